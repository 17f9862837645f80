// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestAllocationInThePlaceOfAnother: UCX names memory by a descriptor and an address, which the
// next allocation may have again. A peer that still has the released one mapped stores elsewhere.
func TestAllocationInThePlaceOfAnother(t *testing.T) {
	for _, transports := range []string{"posix,cma,self", ways[0].config.Transports} {
		t.Run(transports, func(t *testing.T) {
			w := ways[0]
			w.config.Transports = transports
			l := openLane(t, w)
			fill(l.local, 3)
			for key := uint32(testKey + 1); key < testKey+4; key++ {
				a, err := l.far.Allocate(testBytes)
				require.NoError(t, err)
				require.NoError(t, l.far.Map(key, Memory{Ticket: 1, In: a, Mem: a.Bytes()}))
				x, _ := l.far.Export(key)
				slot, err := l.conn.Import(Import{Key: key, Size: testBytes, Ticket: 1, Export: x})
				require.NoError(t, err)
				require.True(t, l.conn.Direct(slot))
				d := []driver.Desc{{LocalKey: testKey, RemoteKey: slot, Len: testBytes}}
				require.NoError(t, submit(l.conn, driver.Write, uint64(key), d, nil))
				require.NoError(t, l.outcome(t, uint64(key)))
				arrived := bytes.Equal(l.local, a.Bytes())
				l.far.Unmap(key) // the import stays
				require.NoError(t, a.Close())
				require.True(t, arrived, "key %d: success is told, and the bytes are not there",
					key)
			}
		})
	}
}
