// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestAnswersThatFillAChunk: bytes in small pieces may leave less room in a chunk than the
// acknowledgement that follows them needs.
func TestAnswersThatFillAChunk(t *testing.T) {
	const piece, step = 600, 8 // room for an acknowledgement is a few steps
	const most = chunkBytes + chunkSlack - headBytes
	owner, near := open(t, Config{}), open(t, Config{})
	far, remote := share(t, owner, 2*most)
	m, local := share(t, near, 2*most)
	for i := range remote {
		remote[i] = byte(i * i >> 7)
	}
	p := dial(t, near, owner.Addr())
	key := importKey(t, p, far)
	for n := most - 2*headBytes; n <= most+headBytes; n += step {
		var descs []driver.Desc
		var want []byte
		for at := 0; at < n; at += piece {
			k := min(piece, n-at)
			descs = append(descs, driver.Desc{
				LocalKey: m.key, RemoteKey: key, Local: uint64(at), Remote: uint64(at * 3 / 2),
				Len: uint64(k),
			})
			want = append(want, remote[at*3/2:][:k]...)
		}
		clear(local)
		require.NoError(t, p.Submit(uint64(n), &driver.Batch{Op: driver.Read, Descs: descs}))
		if err := await(t, near, uint64(n)); err != nil {
			t.Fatalf("read of %d bytes: %v", n, err)
		}
		if !bytes.Equal(local[:n], want) || bytes.Count(local[n:], []byte{0}) != len(local)-n {
			t.Errorf("read of %d bytes: others than those of the owner", n)
		}
	}
}
