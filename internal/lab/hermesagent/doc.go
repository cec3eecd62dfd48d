// Package hermesagent runs the real Hermes Agent of PyPI for tests: its API
// server and its Dashboard as an operator starts them, with a model that is a
// stub of ours, and with no way to the internet.
//
// A test binary that needs it is built with the tag interop, on Linux, and hands
// its TestMain to [Main]. Main does two things before a test runs. First it
// installs what requirements.txt pins by hash, into a virtual environment that is
// kept in the user's cache for the next run; where that is not possible the run
// fails. Then it starts the test binary once more inside a network namespace that
// has a loopback interface and nothing else. So the ports of the product
// (8642, 9119) are always free, two runs never meet, and "needs no network" is a
// property of the kernel and not of settings that a new version may forget.
//
// # Measuring what a path adds
//
// The agent answers slowly because [Model] does: it remembers when it let go of
// each token. A [Tap] in front of the API server remembers when each byte of the
// agent came out of it. The first pair, stub to tap, is the agent's own delay and
// is nobody's fault here; the second, tap to client, is what the path in between
// has added, and is what a test has to judge.
package hermesagent
