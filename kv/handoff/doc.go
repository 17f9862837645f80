// SPDX-License-Identifier: Apache-2.0

// Package handoff hands the KV blocks of a request over from prefill to decode, layer by layer,
// while the prefill still computes.
//
// GroupSender and GroupReceiver hand a request over from several prefill ranks to several decode
// ranks, whose layouts may differ, by a layout.Plan. Both talk through engine notifications, which
// a Mux deals out, and the bytes go as one-sided writes or reads. Each rank has a connection to
// each rank of the other group, also where no bytes go between them:
//
//	each sending rank                      each receiving rank
//	                                       Open: leases the blocks of the request
//	Begin: plan, span; where the receiver
//	reads, its blocks and their leases
//	                                       Grant: where the sender writes, its blocks
//	                                       and their leases
//	Layer, behind the bytes of an edge,
//	or: the receiver may read it
//	                                       Ready, once all edges that carry it are there
//	Done
//	                                       revokes the leases once all senders are done
//	                                       Taken; GroupRequest.Done
//
// Begin and Open meet by the number of the request, in any order. An end on any rank goes to all
// ranks of the other group at once, and each of those passes it on to all of this one: every rank
// learns it from the first that tells, and has a proof of its own that nothing lands in its blocks
// any more. A receiver that is done stays done, also when others fail. The lists of blocks go
// along with Begin and Grant, since the rank that moves the bytes names both ends.
//
// # A pool that grants blocks
//
// A Sender and a Receiver are for one rank on each side, with the same blocks. The Receiver
// chooses the blocks of a request from a pool.Pool, and accepts any peer that connects. They agree
// on what is missing, and then hand that over as two groups of one rank:
//
//	Sender.Begin                           Receiver
//	an offer: request, hashes of its
//	blocks
//	                                       finds the blocks that it has already, waits
//	                                       for room for the others, and opens them
//	                                       an answer: the missing blocks; Accept
//	as GroupPush, with these blocks        as GroupRequest
//	                                       publishes the blocks before Taken
//
// All missing blocks of a request are one lease, engine.Region.LeaseRanges, which says what a peer
// that lies can reach, and how many ranges shm can take from a writer that stands still. Those of
// larger requests stay retired until that goes on or ends.
//
// # Ends
//
// Either side may end a request at any moment. What holds then, always:
//
//   - A receiver revokes the leases, and gives the blocks back to their owner, the pool of a
//     Receiver, when that has returned. Those whose lease cannot be revoked are lost to the pool
//     (Stats.Quarantined) until the engine has found the proof.
//   - A sender aborts its transfers before its blocks are free.
//   - Each side learns why, as an *EndError, and every wait is bounded by Limits.
package handoff
