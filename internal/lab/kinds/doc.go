// Package kinds shows, kind by kind, that what other tunnels fail at does not
// happen here. The kinds are those that users of tunnels, relays and gateways
// report most; docs/failure-kinds.md says where each is shown. Every kind whose
// proof needs the whole path, a device, a broker and a host at once, has a
// package of its own below this one, so that they run side by side:
//
//	conn-adapter      connadapter      our net.Conns keep Go's contract
//	dead-link         deadlink         a link that died is noticed and replaced
//	mux-stall         muxstall         one peer's streams never stop another's
//	stream-buffering  streambuffering  a token is seen before the next is sent
//
// This package is what they share: a Site (a broker with one host enrolled, on
// loopback, with what connects to it) and a Pipe (a TCP path that can be made
// to misbehave). All of it fails the test it was made for and ends with it.
package kinds
