// Package hermesreach is the root of Hermes Reach, the secure way from a phone,
// a headset or a laptop to a Hermes host behind somebody's home router. It holds
// no code: the packages below it do, and README.md says where to start.
//
// Its tests are the rules of the tree: who may import whom, how long a file or a
// function may be, and what must never be written. See layout_test.go.
package hermesreach
