// Package muxstall holds the row mux-stall of the failure kinds: a peer that
// opens streams and does nothing with them, or that speaks the multiplexer
// wrong on purpose, costs itself its session and nobody else anything.
//
// The part of the row that needs a slow link in virtual time (a dead reader
// beside echo streams, bulk both ways, a freeze) is in reach/link/stalltest.
package muxstall
