// SPDX-License-Identifier: Apache-2.0

// Package bench measures transfers: sluice beside a baseline, and beside other engines, in the same
// shapes, on the same machine, in alternation.
//
// A participant is a program, its driver; a lane is what lies between the two memories. The harness
// starts the driver twice, as target and as initiator, or once where one process holds both
// memories. A driver reads Requests from descriptor 3 and writes Answers to descriptor 4, a JSON
// object a line; its standard output and error are kept for messages about its death. Where pieces
// lie is the harness' matter: a request names slots. The harness takes times of processors from
// outside, so that they are counted alike for all. A file is no peer: there the target is a driver
// that keeps it.
//
// A new participant is one file: Serve is the loop of drivers in Go, which package bench/drivers
// has, drivers/wire.py that of those in Python.
//
// A driver that dies, hangs or answers nonsense is killed and becomes a row with the reason, as
// does one whose library is not there. Pairs that take processors while nothing is asked of them
// are stopped outside their turns, so that the others do not pay for it. A run has one limit: what
// there is no time for becomes a row that says so, too.
package bench
