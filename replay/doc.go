// SPDX-License-Identifier: Apache-2.0

// Package replay hands the requests of a trace over between two groups of ranks, each of which is a
// process, and checks that every byte is right.
//
// A parent (Run) makes a plan, starts the processes (Rank), leads them step by step, and adds their
// results up to a Report. The parent and the ranks exchange messages over pipes (package proc). The
// parent sends each message to all ranks, and goes on when all have answered. If a rank complains
// of a peer, the parent finds the process that is stopped or dead (processes.go).
//
//	parent                    each rank
//	plan                      opens its backends, makes its pools, describes itself
//	peers, open               connects to all ranks of the other group
//	for each round of requests, at the pace of the trace:
//	fill                      reserves blocks and fills each cell with bytes that depend on
//	                          request, layer, token and unit; a decode rank reports which tokens
//	                          it has
//	run                       hands over by handoff's GroupSender or GroupReceiver; aborts a
//	                          request, or is killed, if the plan says so
//	check                     compares every byte of its blocks, poisons and frees them
//	close, finish             checks all blocks once more, and reports
//
// Two requests run at a time. The blocks of a failed request are poisoned before another request
// may have them. They are checked when another request gets them, and at the end: a late write
// shows. With faults (faults.go) a failed request is handed over again, over new connections. Any
// other failure that the plan does not ask for is an error of the Report.
//
// # A stream
//
// With Options.Stream there is one rank on each side, and requests are handed over one at a time,
// as the trace has them. The prefill has memory for two layers only: it fills a layer, makes its
// digest, hands it over, waits until it has arrived, and copies the same bytes by memcpy, before or
// after, as a baseline. The decode compares the digest while the prefill fills the next layer. It
// has a prefix cache: it keeps the blocks of requests by hash until it needs the room, and takes
// the first blocks of later requests from there. Those are compared, too.
//
// # What is proved
//
// A good Report has no mismatch, no leaked block, and no unexpected end; Report.Err says what is
// wrong. A mismatch is a wrong byte in a complete request, in a token that was present before the
// request, in a free block, or in a block that was poisoned after its request had failed.
//
// # Files
//
// plan.go chooses layers, pools, aborts and the rank to kill. run.go is the parent, rank.go a rank,
// pools.go the memory of a rank and the check of its content, content.go the bytes of a cell.
// ring_unsafe.go is the memory of a prefill that streams, baseline.go the memcpy. report.go is the
// result. planning.go prints what a plan of two groups moves.
package replay
