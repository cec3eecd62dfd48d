// Package connadapter holds the row conn-adapter of the failure kinds: a
// net.Conn made from a WebSocket or a stream of a multiplexer that breaks Go's
// contract of net.Conn breaks whatever is built on it, late and elsewhere.
//
// Other packages show the row for the parts (reach/link for a stream's Conn on
// any carrier, broker for the device's end of a whole path); here are the ends
// that programs get: the host's end, and the pinned connection inside.
package connadapter
