// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestFreshPagesOfAnotherBackend has one Shared registered with two backends. A writer of the
// first is frozen, and the Revoke of the first puts fresh pages under the range. What a writer of
// the second wrote lands all the same, whether its write began before or after that: each
// write that ended well is in the memory.
func TestFreshPagesOfAnotherBackend(t *testing.T) {
	for _, where := range []string{"shm: mapped", "shm: copied", "shm: left"} {
		t.Run(where, func(t *testing.T) {
			freshOfAnother(t, where)
		})
	}
}

func freshOfAnother(t *testing.T, where string) {
	const size = 1 << 20
	one, two := hasty(t), open(t, Config{SocketDir: t.TempDir()})
	buf, far := shared(t, one, size, 1)
	seg := buf.Segment()
	seg.Secret[0] = 2
	second, err := two.Register(seg)
	require.NoError(t, err)
	farTwo := second.(*memory)

	frozen, writer := open(t, Config{}), open(t, Config{})
	silent(dial(t, frozen, one.Addr()), far.Key(), driver.Write)
	src, near := shared(t, writer, size, 3)
	fill(src.Bytes(), 0x5A)
	p := dial(t, writer, two.Addr())
	key := importOf(t, p, farTwo)
	write := func(page uint64) driver.Desc {
		return driver.Desc{Len: 4096, Remote: page * 4096, LocalKey: near.Key(), RemoteKey: key}
	}
	release := parkedMover(t, writer, p, where, write(0))
	require.NoError(t, far.Revoke(context.Background()))
	require.NoError(t, release())
	require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{write(1)}}))
	require.NoError(t, await(t, writer, 2))
	require.Equal(t, 8192, bytes.Count(buf.Bytes(), []byte{0x5A}),
		"a write that ended well is not in the memory")
}
