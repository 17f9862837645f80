// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// rig is a backend with host memory and a file, connected to itself.
type rig struct {
	b             *Backend
	p             driver.Peer
	mem           []byte
	file          *files.File
	l             driver.Memory // mem
	local, remote uint32
	done          [64]driver.Completion
}

func newRig(tb testing.TB, cfg Config, file driver.Segment, bytes uint64) *rig {
	tb.Helper()
	b, err := New(cfg)
	if err != nil {
		drivertest.SkipIfUnavailable(tb, err)
	}
	buf, err := hostmem.Alloc(bytes, hostmem.Options{Purpose: "test", Populate: true})
	require.NoError(tb, err)
	r := &rig{b: b, mem: buf.Segment().Mem}
	tb.Cleanup(func() {
		if err := errors.Join(b.Close(), buf.Close()); err != nil {
			tb.Error(err)
		}
	})
	l, err := b.Register(buf.Segment())
	require.NoError(tb, err)
	m, err := b.Register(file)
	require.NoError(tb, err)
	r.p, err = b.Connect(context.Background(), b.Addr())
	require.NoError(tb, err)
	token, err := m.AppendToken(nil)
	require.NoError(tb, err)
	r.l, r.local, r.file = l, l.Key(), m.(*files.Memory).File
	r.remote, _, err = r.p.Import(token)
	require.NoError(tb, err)
	return r
}
