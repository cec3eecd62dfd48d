//go:build !linux

package main

const asStandIn = "HERMES_REACH_TEST_AS_HERMES"

func serveStandIn() {}
