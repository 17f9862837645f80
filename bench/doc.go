// SPDX-License-Identifier: Apache-2.0

// Package bench measures transfers: sluice beside a baseline, and beside other engines, in the same
// shapes, on the same machine, in alternation.
//
// A participant is a program, its driver; a lane is what lies between the two memories; a shape is
// what one operation moves, and where its pieces lie. The harness starts each driver twice, as
// target and as initiator, or once where one process holds both memories. A driver reads Requests
// from descriptor 3 and writes Answers to descriptor 4, a JSON object a line; the harness keeps its
// standard output and error for messages about its death. A file is no peer: there the target is a
// driver that keeps it.
//
// # The order of a run
//
// Run goes through the lanes, one after the other. On each lane
//
//  1. runner.open starts all pairs (OpenPair), has each move a first piece, and measures what it
//     takes of processors while nothing is asked of it. A pair that takes some is stopped outside
//     its turns from then on, so that the others do not pay for it.
//  2. runner.shapes takes each shape in turn. All participants prepare it, prove by stamps and
//     digests that bytes arrive (Pair.check), and warm up; then they measure in alternation, a
//     slice of time each, for some rounds.
//  3. runner.pings measures round trips of a message.
//  4. Report.compare adds the ratios of ours to each baseline of the same shape.
//
// # What is certain
//
// All participants move the same slots: the harness draws them, and a request names them. Times of
// processors are read from outside, so they are counted alike for all. A figure is the median of
// rounds that alternated. A driver that dies, hangs or answers nonsense is killed, with its process
// group, and becomes a row with the reason, as does one whose library is not there; a pair that
// lost a process is opened again, at most three times. A run has one limit: what there is no time
// for becomes a row that says so. The report says where other programs used the machine meanwhile.
//
// # Which file to read
//
//   - participants.go: the lanes, and the participants of each
//   - shape.go: shapes, and the places of their pieces
//   - run.go: the order of a run; row.go and report.go: what it leaves
//   - participant.go: a pair; driver.go: a process; protocol.go: what they say to each other
//   - serve.go: the loop of drivers in Go; package bench/drivers has them
//   - text.go, lead.go: the report for people
//
// A new participant is one file in bench/drivers, or a script with its wire.py, and a line in
// participants.go.
package bench
