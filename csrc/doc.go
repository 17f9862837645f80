// SPDX-License-Identifier: Apache-2.0

// Package csrc is the C data plane behind a Go face that does not show it. The packages below it
// hold the plain copies, and what is over libibverbs, libcuda and libcufile.
//
// UCXContext and UCXConn move bytes between processes over UCX, which LoadUCX opens at run
// time; with CGO_ENABLED=0 there is none, and OpenUCX says so. A batch is one crossing;
// polling is none. Below, each context has workers, each with a lock and a thread that
// moves it when nobody else does:
//
//   - ucx_load.c, ucx_abi.h: libucp, in our own words;
//   - ucx_open.c, ucx_progress.c: contexts, workers, their threads and locks;
//   - ucx_memory.c, ucx_shared.c, ucx_fence.c: our memory, and taking it back from peers;
//   - ucx_conn.c, ucx_end.c, ucx_import.c: connections, their ends, and the memory of peers that
//     they know;
//   - ucx_batch.c, ucx_runs.c, ucx_direct.c, ucx_pulled.c, ucx_served.c, ucx_window.c: what we ask
//     for, by plain loads and stores, by copies of the kernel, or by messages that the owner
//     serves;
//   - ucx_pull.c, ucx_gate.c: those copies, and how a process takes back the leave to make them;
//   - ucx_message.h, ucx_send.c, ucx_arrive.c, ucx_serve.c, ucx_inbox.c: messages, and what becomes
//     of those that arrive. Nothing in one is believed.
//
// It knows a batch as pieces.h has it: descriptors, or entries of a pattern.
package csrc
