// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

import (
	"github.com/sluicehq/sluice/backends"
)

// Native says whether copies run in C.
const Native = false

func copyDescs(op backends.Op, local, remote []byte, descs []backends.Desc) error {
	for i := range descs {
		if err := descs[i].Check(uint64(len(local)), uint64(len(remote))); err != nil {
			return backends.ErrBounds
		}
	}
	for i := range descs {
		copyOne(op, local, remote, &descs[i])
	}
	return nil
}

func copyPages(op backends.Op, local, remote []byte, p *backends.Pages, first, n int) error {
	for i := first; i < first+n; i++ {
		d := p.Desc(i)
		if err := d.Check(uint64(len(local)), uint64(len(remote))); err != nil {
			return backends.ErrBounds
		}
		copyOne(op, local, remote, &d)
	}
	return nil
}

func copyOne(op backends.Op, local, remote []byte, d *backends.Desc) {
	l, r := local[d.Local:][:d.Len], remote[d.Remote:][:d.Len]
	if op == backends.Write {
		copy(r, l)
	} else {
		copy(l, r)
	}
}
