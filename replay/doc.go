// SPDX-License-Identifier: Apache-2.0

// Package replay hands the requests of a trace over between processes, and proves that every byte
// is right.
//
// A parent makes a plan, starts the processes, leads them step by step, and adds their figures up
// to a Report. It speaks with them in messages over pipes (package proc): all are told something,
// and it goes on when all have answered (processes.go, which also finds the process that is stopped
// or dead when others complain).
//
// # A pair
//
// Run has two processes, which meet over a Unix socket of the plan's name:
//
//	prefill (Prefill)                      decode (Decode)
//	a ring of layers (staging.go)          the pool
//	for each request of the trace:
//	waits for its arrival
//	Begin: which blocks are missing?       a Receiver finds those that it has
//	for each layer: fills the ring,        Ready of each layer; or Cancel, where the
//	pushes it, and copies the same         plan has it abort
//	bytes by memcpy in turn; or Abort
//	Finish                                 compares every byte of every block (check.go)
//	waits until decode is through          poisons the blocks of aborted requests, which
//	                                       nothing may write to (latewrites.go)
//
// A transfer is timed while nothing is filled or compared. With faults (faults.go) a request that
// fails is begun again over a new connection. With Offload the decode process spills blocks to a
// file and reads them back (tier.go, spill.go).
//
// # Groups
//
// RunGroups has two groups of ranks with layouts of their own, each rank a process (GroupRank).
// They meet by descriptions that the parent passes on. Requests go in rounds of two at once: fill,
// run, check. A rank fills its cells with what request, layer, token and unit say, hands over by
// handoff's GroupSender or GroupReceiver, compares every byte of its blocks, and poisons them. As
// planned, ranks end requests, and one is killed in the last round: then the others must end theirs
// within the limit.
//
// # What is proved
//
// A Report has no mismatches, nothing leaked, and no unexpected end; Report.Err says what is wrong.
// A mismatch is a byte that is not what it must be: of a request that is complete, of a free block,
// of a block whose request was aborted and that was poisoned since.
//
// plan.go and groupplan.go choose pools, aborts and the rank to kill; run.go and groups.go are the
// parents; decode.go, prefill.go with pushing.go, and grouprank.go with grouprounds.go are the
// processes; groupmemory.go is the pool of a rank. report.go and groupreport.go are what comes out.
package replay
