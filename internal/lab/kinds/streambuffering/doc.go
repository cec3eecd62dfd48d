// Package streambuffering holds the row stream-buffering of the failure kinds:
// a proxy on the way that waits for more before it passes on what it has.
//
// The service here never sends a chunk before the device has said that it saw
// the one before, so anything that waits for more waits for ever, and two
// chunks can never arrive as one.
package streambuffering
