// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package digest

func sum(mem []byte, c *Cells, k *Key) (Digest, error) { return Reference(mem, c, k) }

func crcWays() []crcWay { return nil }
