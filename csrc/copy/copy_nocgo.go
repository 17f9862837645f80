// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package copy

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

func copyDescs(op driver.Op, local, remote []byte, descs []driver.Desc, _ Way) (err error) {
	for i := range descs {
		if !fits(&descs[i], local, remote) {
			return driver.ErrBounds
		}
	}
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	for i := range descs {
		copyOne(op, local, remote, &descs[i])
	}
	return nil
}

func copyPlain(op driver.Op, local, remote []byte, p *driver.Pattern, first, n int,
	w Way) error {
	return copyNest(op, local, remote, p, first, n, w)
}

func copyNest(op driver.Op, local, remote []byte, p *driver.Pattern, first, n int,
	_ Way) (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	for i := first; i < first+n; i++ {
		d := Run(p, i)
		if !fits(&d, local, remote) {
			return driver.ErrBounds
		}
		copyOne(op, local, remote, &d)
	}
	return nil
}

func fits(d *driver.Desc, local, remote []byte) bool {
	return d.Check(uint64(len(local)), uint64(len(remote))) == nil
}

func copyOne(op driver.Op, local, remote []byte, d *driver.Desc) {
	l, r := local[d.Local:][:d.Len], remote[d.Remote:][:d.Len]
	if op == driver.Write {
		copy(r, l)
	} else {
		copy(l, r)
	}
}

const streams = false

func stream(dst, src []byte) { copy(dst, src) }
