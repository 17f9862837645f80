// SPDX-License-Identifier: Apache-2.0

// Package handoff hands the KV blocks of a request over from prefill to decode, layer by layer,
// while the prefill still computes.
//
// GroupSender and GroupReceiver hand a request over from several prefill ranks to several decode
// ranks, whose layouts may differ, by a layout.Plan. Both talk through engine notifications, which
// a Mux deals out, and the bytes go as one-sided writes or reads. Each rank has a connection to
// each rank of the other group, also where no bytes go between them. The way of a request:
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
// learns it from the first message that reaches it, and has a proof of its own that nothing lands
// in its blocks any more. A receiver that is done stays done, also when others fail. The lists of
// blocks go along with Begin and Grant, since the rank that moves the bytes names both ends.
//
// # What proves that blocks are free again
//
// Either side may end a request at any moment. What holds then, always:
//
//   - A receiver revokes the leases: when engine.Lease.Revoke has returned nil, nothing lands
//     through them any more. Only then is the request done. Where a lease could not be revoked
//     (Stats.Quarantined), Err is a *LeasesError, which has what to wait for: the engine goes on to
//     look for the proof.
//   - A sender aborts its transfers before its blocks are free, and revokes the leases of what
//     receivers read.
//   - Each side learns why, as an *EndError, and every wait is bounded by Limits.
//
// # Files
//
// group.go has the configuration and what ranks have in common. Of a sending rank: groupsender.go
// meets requests and messages, grouppush.go is one request from Begin on, grouplayer.go its layers
// and its end. Of a receiving rank: groupreceiver.go, grouprequest.go, and grouplink.go for what
// one sender brings of a request. groupline.go has leases, their proof, imports and transfers;
// grouptail.go fills what lies behind a request with zeros, groupdigest.go compares digests.
// message.go and grouppayload.go are the bytes of the messages, and mux.go deals them out.
package handoff
