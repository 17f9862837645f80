// SPDX-License-Identifier: Apache-2.0

// Package handoff hands the KV blocks of a request over from a prefill process
// to a decode process, layer by layer, while the prefill still computes.
//
// The prefill side is a Sender, the decode side a Receiver. Both talk through
// engine notifications, which a Mux deals out, and the bytes go as one-sided
// writes:
//
//	sender                                receiver
//	Begin: request, hashes of its blocks
//	                                      finds the blocks that it has already,
//	                                      waits for room for the others, and
//	                                      leases each of those out
//	                                      Grant: a lease for each missing block
//	Layer, behind the bytes of a layer    Request.Layers
//	Done
//	                                      revokes the leases, publishes the blocks
//	                                      Taken; Request.Done
//
// Either side may end it at any moment. What holds then, always:
//
//   - The sender first aborts its transfers, and tells the receiver when that
//     has returned.
//   - The receiver first revokes the leases, and gives the blocks back to the
//     pool when that has returned. A block whose lease cannot be revoked is
//     never used again (Stats.Quarantined).
//   - Each side learns why, as an *EndError, and every wait is bounded by a
//     limit of its configuration.
package handoff
