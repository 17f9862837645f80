// SPDX-License-Identifier: Apache-2.0

// Package handoff hands the KV blocks of a request over from prefill to decode, layer by layer,
// while the prefill still computes.
//
// GroupSender and GroupReceiver hand a request over from several prefill ranks to several decode
// ranks. Their layouts may differ: a layout.Plan says which rank moves which cells to which. An
// edge of the plan is a pair of ranks with the cells that move between them. The ranks exchange
// engine notifications, which a Mux distributes, and the bytes go as one-sided writes or reads.
// Each rank has a connection to each rank of the other group, also to those with which it has no
// edge. The way of a request:
//
//	each sending rank                      each receiving rank
//	                                       Open: leases the blocks of the request
//	Begin: plan and span; if receivers
//	read, also the sender's blocks and
//	their leases
//	                                       Grant, if senders write: the receiver's
//	                                       blocks and their leases
//	Layer, for each edge: its bytes are
//	written, or may be read
//	                                       Ready: all edges with this layer have arrived
//	Done: all layers are
//	                                       once all senders are done: revokes the leases,
//	                                       sends Taken, and GroupRequest.Done is closed
//
// Begin and Open of a request are matched by its number, and may come in any order. A rank on which
// a request ends with an error tells all ranks of the other group at once, and each of those tells
// all ranks of the first group. So every rank learns of it by the first message that arrives, and
// each looks for its own proof that nothing lands in its blocks any more. A receiver that is done
// stays done when others fail. Begin and Grant carry the lists of blocks, since the rank that moves
// the bytes names the blocks of both ends.
//
// # What proves that blocks are free again
//
// Either side may end a request at any moment. Then, always:
//
//   - A receiver revokes the leases of its blocks. When engine.Lease.Revoke has returned nil,
//     nothing lands through them any more, and only then is the request done. If a lease could
//     not be revoked in time (Stats.Quarantined), Err is a *LeasesError with the leases to wait
//     for: the engine goes on to look for their proof.
//   - A sender aborts its transfers, and revokes the leases by which receivers read its blocks,
//     before its blocks are free.
//   - Each side learns the reason, as an *EndError, and every wait is bounded by Limits.
//
// # Files
//
//   - group.go: the configuration, and what all ranks have in common.
//   - groupsender.go: a sending rank, and which request a message is for; grouppush.go: one request
//     there, from Begin on; grouplayer.go: its layers and its end.
//   - groupreceiver.go: a receiving rank; grouprequest.go: one request there; grouplink.go: the
//     part of one sender in it.
//   - groupline.go: leases, their proof, imports and transfers.
//   - grouptail.go: zeros behind the last token of a request; groupdigest.go: the comparison of
//     digests.
//   - message.go and grouppayload.go: the bytes of the messages; mux.go: which sender or receiver
//     gets each.
package handoff
