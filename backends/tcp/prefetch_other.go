// SPDX-License-Identifier: Apache-2.0

//go:build !amd64 && !arm64

package tcp

// prefetch does nothing where there is no instruction for it.
func prefetch([]byte) {}
