// SPDX-License-Identifier: Apache-2.0

//go:build amd64 || arm64

package tcp

// prefetch has the processor fetch the lines of b, which is not empty, into its cache. It waits for
// none of them, and reads nothing that a program could tell.
//
//go:noescape
func prefetch(b []byte)
