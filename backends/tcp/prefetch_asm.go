// SPDX-License-Identifier: Apache-2.0

//go:build amd64 || arm64

package tcp

// prefetch asks the processor to load the cache lines of b into its cache, and does not wait for
// them. It is a hint: it has no other effect, and memory that is unmapped causes no fault. b must
// not be empty.
//
//go:noescape
func prefetch(b []byte)
