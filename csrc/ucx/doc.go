// SPDX-License-Identifier: Apache-2.0

// Package ucx is the C data plane of UCX, and its Go interface.
//
// A Context and its Conns move bytes between processes over libucp, which Load opens at run time.
// With CGO_ENABLED=0 Load returns an error that says so. A context has workers, each with a lock
// and a thread that steps it while no caller does. Submitting a batch crosses into C once; polling
// does not cross. A batch is what csrc/pieces.h describes: descriptors, or entries of a pattern.
//
// # What leaves
//
//   - batch.c: Submit checks every piece against our memory and the peer's, takes a place in the
//     ring and credit for the notification, and puts the batch behind those before it.
//   - move.c: a batch is cut into messages, of one run of bytes or of a table of many. Each message
//     with data has a record in the window of the connection until the owner has answered it.
//     A write is acknowledged by the owner; the answer to a read is landed here.
//   - send.c: bytes are copied into a message of ours; UCX holds no memory of the program.
//
// # What arrives
//
//   - arrive.c: a message is for a connection by an id that cannot be guessed. One that cannot be
//     handled now is held, with all behind it: it is too old, or pages are being moved.
//   - serve.c: what a peer asks of our memory. A write lands, and a read is answered, if the ticket
//     is the memory's, the range is what the peer may reach, and the message is young enough.
//   - inbox.c: notifications and control messages, until Go takes them. Each is bounded.
//
// # What is proved
//
//   - memory.c: sl_ucx_revoke ends a ticket, and then has each worker's lock once. A message is
//     landed under that lock, so nothing that was admitted before is in hand any more.
//   - ages.c: how old a message may be that lands unasked, and when a batch may end whose owner
//     does not answer. The model is spec/ucx_ages.pml.
//   - end.c: how a connection is lost, drained, ended and given back, and which batches end when.
//
// open.c, progress.c and clock.c have the contexts, the workers' threads and locks, and the clock;
// conn.c the beginning of a connection; load.c and abi.h declare libucp without its headers. All
// that a message contains is checked.
package ucx
