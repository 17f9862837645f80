// SPDX-License-Identifier: Apache-2.0

// Package bench measures transfers by sluice, by baselines and by other engines: in the same
// shapes, on the same machine, and in alternation.
//
// A participant is a program that is measured, called by its driver. A lane is the way between the
// two memories, such as TCP. A shape says how many bytes one operation moves, and where its pieces
// lie. The harness starts each driver twice, as target and as initiator, or once if one process
// holds both memories. A driver reads Requests from descriptor 3 and writes Answers to descriptor
// 4, one JSON object per line. The harness keeps the end of the driver's standard output and error,
// to report why it died. On lane file, the target is a driver that keeps the file.
//
// # The order of a run
//
// Run goes through the lanes, one after the other. On each lane
//
//  1. runner.open starts all pairs (OpenPair), lets each move a first piece, and measures the CPU
//     time that it uses while idle. A pair that uses some is stopped outside its turns from then
//     on, so that it does not slow down the others.
//  2. runner.shapes takes each shape in turn. All participants prepare it, prove by stamps and
//     digests that bytes arrive (Pair.check), and warm up; then they measure in alternation, a
//     slice of time each, for some rounds.
//  3. runner.pings measures round trips of a message.
//  4. Report.compare adds the ratios of ours to each baseline of the same shape.
//
// # What is certain
//
// All participants move the same slots: the harness draws them at random, and each request names
// them. The harness reads the CPU time of the processes from outside, in the same way for all. A
// figure is the median of rounds in which the participants alternated.
//
// The harness kills a driver that hangs or gives a malformed answer, with its process group. Its
// row gives the reason, as does the row of a driver that died, or whose library is missing. A pair
// that has lost a process is opened again, at most three times. A run has one time limit; a shape
// for which no time is left gets a row that says so. The report says if other programs used the
// machine meanwhile.
//
// # Which file to read
//
//   - participants.go: the lanes, and the participants of each
//   - shape.go: shapes, and the places of their pieces
//   - run.go: the order of a run; row.go and report.go: its results
//   - participant.go: a pair; driver.go: a process; protocol.go: requests and answers
//   - serve.go: the loop of drivers in Go; package bench/drivers has them
//   - text.go, lead.go: the report for people
//
// A new participant is one file in bench/drivers, or a script with its wire.py, and a line in
// participants.go.
package bench
