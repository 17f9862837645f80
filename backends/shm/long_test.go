// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestLongBatches moves long runs at odd places both ways, by memcpy and past the caches, with
// bytes around them that stay.
func TestLongBatches(t *testing.T) {
	const size, margin = 18 << 20, 101
	owner, b := open(t, Config{}), open(t, Config{})
	buf, far := shared(t, owner, size, 1)
	own, near := shared(t, b, size, 1)
	p := dial(t, b, owner.Addr())
	key := importOf(t, p, far)
	tag := uint64(0)
	for _, run := range []uint64{3<<20 + 77, 17<<20 + 77} {
		for _, op := range []driver.Op{driver.Write, driver.Read} {
			src, dst := own.Bytes(), buf.Bytes()
			if op == driver.Read {
				src, dst = dst, src
			}
			tag++
			for i := range src {
				src[i], dst[i] = byte(uint64(i)*(tag+6)>>3), 0xEE
			}
			d := driver.Desc{Local: margin, Remote: margin + 2, Len: run, LocalKey: near.Key(),
				RemoteKey: key}
			want := bytes.Repeat([]byte{0xEE}, size)
			from, to := d.Local, d.Remote
			if op == driver.Read {
				from, to = to, from
			}
			_ = append(want[:to], src[from:][:run]...) // in place
			require.NoError(t, p.Submit(tag, &driver.Batch{Op: op, Descs: []driver.Desc{d}}))
			require.NoError(t, await(t, b, tag))
			require.True(t, bytes.Equal(want, dst), "%v of %d bytes", op, run)
		}
	}
}
