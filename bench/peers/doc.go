// SPDX-License-Identifier: Apache-2.0

// Package peers measures sluice beside other transfer engines: the same shapes,
// on the same machine, in alternation, each engine with two processes of its own
// and by the ways that its makers recommend.
//
// A participant is a driver: a program that is one end of one engine. It reads
// Requests from descriptor 3 and writes Answers to descriptor 4, a JSON object a
// line; its standard output and error are kept for messages about its death. The
// program of this package starts it twice, as target and as initiator, and takes
// times of processors from outside, so that they are counted alike for all. A file is
// no peer: there the target is a driver that keeps it. A new peer is one file: Serve is
// the loop of drivers in Go, drivers/wire.py that of those in Python.
//
// A driver that dies, hangs or answers nonsense is killed and becomes a row with
// the reason, as does one whose library is not there. Pairs that take processors
// while nothing is asked of them are stopped outside their turns, so that the
// others do not pay for it. A run has one limit: what there is no time for becomes a row
// that says so, too.
package peers
