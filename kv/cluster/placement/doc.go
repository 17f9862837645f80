// SPDX-License-Identifier: Apache-2.0

// Package placement says on which nodes of a cluster the blocks of KV chains lie. It computes
// only: it does no I/O, reads no clock and starts no goroutine, and the same calls in the same
// order give the same answers on every node.
//
// A chain of blocks is cut into segments that grow towards its end. A segment has one owner, which
// each node finds by itself: the best node by a hash of the segment and the node. Nothing needs to
// be stored or asked for that, and a node that joins or leaves moves its own share only.
package placement
