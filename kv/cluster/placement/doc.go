// SPDX-License-Identifier: Apache-2.0

// Package placement says on which nodes of a cluster the blocks of KV chains lie. It computes
// only: it does no I/O, reads no clock and starts no goroutine, and the same calls in the same
// order give the same answers on every node.
//
// A chain of blocks is cut into segments that grow towards its end. A segment has one owner, which
// each node finds by itself: the best node by a hash of the segment and the node. Nothing needs to
// be stored or asked for that, and a node that joins or leaves moves its own share only. Beyond
// that, each node keeps three things:
//
//   - Its Heat counts what is read from it, and gives a segment that is a large part of a node's
//     load more owners: the next ones in the order of the same hash.
//   - Its Journal makes digests, which it sends to all other nodes: the blocks that it has although
//     others own them, its segments with more than one owner, and its load. A View has what the
//     digests of the others say. What a View says may be out of date: then it costs a question, and
//     the answer is a miss.
//   - When nodes join or leave, Plan says what it should send to whom, and Handover at which rate.
//
// Files:
//
//	owners.go  segments, and the nodes that own one
//	heat.go    how many owners a segment has, and which of them to ask
//	digest.go  what nodes tell each other
//	view.go    what a node knows of the others
//	plan.go    what moves when nodes come and go
package placement
