// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

import (
	"github.com/sluicehq/sluice/driver"
)

// Native says whether copies run in C.
const Native = false

func copyDescs(op driver.Op, local, remote []byte, descs []driver.Desc) error {
	for i := range descs {
		if err := descs[i].Check(uint64(len(local)), uint64(len(remote))); err != nil {
			return driver.ErrBounds
		}
	}
	for i := range descs {
		copyOne(op, local, remote, &descs[i])
	}
	return nil
}

func copyPattern(op driver.Op, local, remote []byte, p *driver.Pattern, first, n int) error {
	for i := first; i < first+n; i++ {
		d := p.Desc(i)
		if err := d.Check(uint64(len(local)), uint64(len(remote))); err != nil {
			return driver.ErrBounds
		}
		copyOne(op, local, remote, &d)
	}
	return nil
}

func copyOne(op driver.Op, local, remote []byte, d *driver.Desc) {
	l, r := local[d.Local:][:d.Len], remote[d.Remote:][:d.Len]
	if op == driver.Write {
		copy(r, l)
	} else {
		copy(l, r)
	}
}
