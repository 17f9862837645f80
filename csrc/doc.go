// SPDX-License-Identifier: Apache-2.0

// Package csrc is the C data plane behind a Go face that does not show it. Package copy
// below it holds the plain copies.
//
// UCXContext and UCXConn move bytes between processes over UCX, which LoadUCX opens at run
// time; with CGO_ENABLED=0 there is none, and OpenUCX says so. A batch is one crossing;
// polling is none. Below, each context has workers, each with a lock and a thread that
// moves it when nobody else does:
//
//   - ucx_load.c, ucx_abi.h: libucp, in our own words;
//   - ucx_open.c, ucx_progress.c: contexts, workers, their threads and locks;
//   - ucx_memory.c, ucx_shared.c, ucx_fence.c: our memory, and taking it back from peers;
//   - ucx_conn.c, ucx_import.c: connections, and the memory of peers that they know;
//   - ucx_batch.c, ucx_direct.c, ucx_pulled.c, ucx_served.c, ucx_window.c: what we ask for, by plain
//     loads and stores, by copies of the kernel, or by messages that the owner serves;
//   - ucx_pull.c, ucx_gate.c: those copies, and how a process takes back the leave to make them;
//   - ucx_message.h, ucx_parcel.c, ucx_serve.c, ucx_inbox.c: messages, and what becomes of those
//     that arrive. Nothing in one is believed.
//
// VerbsContext and VerbsConn do so over RDMA verbs, which LoadVerbs opens at run time. A
// context has rails (ports of devices), a lock, and a thread that takes completions when nobody
// else does; a connection has lanes (queue pairs), which are made, fail and are made anew. What its two ends
// must agree on is carried by the caller:
//
//   - verbs_load.c, verbs_abi.h: libibverbs, in our own words;
//   - verbs_open.c, verbs_rail.c, verbs_receive.c, verbs_memory.c: contexts, rails, and our memory
//     as NICs and peers know it;
//   - verbs_traffic.c, verbs_progress.c, verbs_events.c: the thread, and what devices say;
//   - verbs_conn.c, verbs_pair.c, verbs_lane.c, verbs_import.c: connections, their lanes, and the
//     memory of peers that they know;
//   - verbs_batch.c, verbs_post.c, verbs_record.c, verbs_complete.c: from batches to work
//     requests, and what becomes of each;
//   - verbs_note.c: numbered messages and counts, and credit for them.
//
// Both know a batch as pieces.h has it: descriptors, or entries of a pattern.
//
// CUDADevice is a card behind libcuda, which LoadCUDA opens at run time: cuda_calls.h has it in
// our own words, cuda_device.c makes the device's context current in every call. CUDAMover moves
// batches on the streams of a card, and puts their ends into a ring:
//
//   - cuda_ends.c: the further functions of libcuda, and the ring;
//   - cuda_mover.c: movers, their lanes (a stream with a thread), and what the threads do;
//   - cuda_feed.c, cuda_stage.c: from batches to copies and launches, in chunks, and what a processor gathers;
//   - cuda_memory.c: pinned memory, whose an address is, and memory of devices;
//   - cuda_stream.c: streams and events of the program.
package csrc
