// SPDX-License-Identifier: Apache-2.0

// Package replay hands the requests of a trace over between two groups of ranks, each a process of
// its own, and proves that every byte is right.
//
// A parent (Run) makes a plan, starts the processes (Rank), leads them step by step, and adds their
// results up to a Report. It speaks with them in messages over pipes (package proc): all get a
// message, and it goes on when all have answered (processes.go, which also finds the process that
// is stopped or dead when others complain).
//
//	parent                    each rank
//	plan                      opens its backends, makes its pools, describes itself
//	peers, open               connects to all ranks of the other group
//	for each round of requests, at the pace of the trace:
//	fill                      takes blocks and fills them with what request, layer, token and
//	                          unit say; a decode rank says which tokens are there already
//	run                       hands over by handoff's GroupSender or GroupReceiver; ends a request
//	                          where the plan says so; or is killed
//	check                     compares every byte of its blocks, poisons them, gives them back
//	close, finish             looks at all blocks once more, and reports
//
// Requests go two at once. Blocks of a request that failed are poisoned before others may have
// them, and compared when others take them, and at the end: nothing may be written there. With
// faults (faults.go) what fails is handed over again, over new connections; else a failure that
// nothing was to bring about is an error of the Report.
//
// # A stream
//
// With Options.Stream there is one rank on each side, which hands a trace over as it is, one
// request at a time. The prefill has memory for two layers only: it fills a layer, hands it over,
// waits until it has landed, and copies the same bytes by memcpy, before or after, as a baseline.
// The decode keeps the blocks of requests by their hashes until it needs the room, and has the
// first blocks of later requests from there. Those are compared, too.
//
// # What is proved
//
// A Report has no mismatches, nothing leaked, and no unexpected end; Report.Err says what is wrong.
// A mismatch is a byte that is not what it must be: of a request that is complete, of a token that
// was there before, of a free block, of a block whose request was ended and that was poisoned
// since.
//
// plan.go chooses layers, pools, aborts and the rank to kill; run.go is the parent, rank.go a
// process; pools.go is its memory and what must lie there, ring_unsafe.go that of a prefill which
// streams, baseline.go the memcpy. report.go is what comes out. planning.go says what a plan of two
// groups moves.
package replay
