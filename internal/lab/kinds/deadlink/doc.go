// Package deadlink holds the row dead-link of the failure kinds: a tunnel that
// died is noticed on both ends, and replaced by the same process once the path
// is good again.
//
// The paths are real. Host, broker and device stand in network namespaces of
// their own, each with one TUN interface, and the test is the network between
// them: it reads packets from one interface and writes them to another, or does
// not, or under another source address. So the kernel's own TCP meets silence,
// one-way silence and resets as it would behind a bad router. The broker is a
// process of its own, to be killed.
//
// All of this needs Linux and a user who may make namespaces. Elsewhere the
// package has no tests; on Linux they fail when the namespaces cannot be made.
package deadlink
