// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/engine"
)

const chainBytes = 5 << 20

// openChainEnd opens an engine with memory of a device, and a backend between hosts that does not
// know of it.
func openChainEnd(t *testing.T) (*engine.Engine, driver.Segment) {
	t.Helper()
	carrier, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0", Plaintext: true})
	require.NoError(t, err)
	b, err := New(testConfig())
	if err != nil {
		_ = carrier.Close()
		drivertest.SkipIfUnavailable(t, err)
	}
	disk, err := posix.New(posix.Config{})
	require.NoError(t, err)
	seg, owner, err := b.AllocDevice(0, chainBytes)
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Backends: []driver.Backend{carrier, b, disk}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(e.Close(), owner.Close())) })
	return e, seg
}

// TestChains moves memory of a device to that of another engine and to a file of it, and back, by
// device, DRAM, tcp, DRAM, device or disk. Entries of 656 bytes come back in another order. A lease
// of some ranges of such memory is revoked: a chain's bytes are placed by the owner's engine, which
// looks at each piece.
func TestChains(t *testing.T) {
	near, hbm := openChainEnd(t)
	far, there := openChainEnd(t)
	dir := t.TempDir()
	f, err := posix.Open(filepath.Join(dir, "file"), posix.OpenOptions{Create: true,
		Len: chainBytes})
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	region, err := far.Register("hbm", there)
	require.NoError(t, err)
	_, err = far.Register("file", f.Segment())
	require.NoError(t, err)
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	require.NoError(t, err)
	go func() { _ = far.Serve(context.Background(), l) }()
	ctx, cancel := context.WithTimeout(t.Context(), 2*limit)
	defer cancel()
	p, err := near.Dial(ctx, "unix", filepath.Join(dir, "socket"))
	require.NoError(t, err)
	local, err := near.Register("local", hbm)
	require.NoError(t, err)

	for i, name := range []string{"hbm", "file"} {
		m, err := p.Remote(name)
		require.NoError(t, err)
		run := func(op engine.Op, add func(*engine.Transfer) error) {
			t.Helper()
			tr, err := near.NewTransfer(p, op, engine.Route{Only: engine.Staged})
			require.NoError(t, err)
			require.NoError(t, errors.Join(add(tr), tr.Post()))
			require.NoError(t, errors.Join(tr.Wait(ctx), tr.Close()), "%v %s", op, name)
		}
		all := func(tr *engine.Transfer) error { return tr.Add(local, 0, m, 0, chainBytes) }
		want := make([]byte, chainBytes)
		_, _ = rand.NewChaCha8([32]byte{byte(i)}).Read(want) // never fails
		writeCard(t, hbm, want)
		run(engine.Write, all)
		writeCard(t, hbm, make([]byte, chainBytes))
		pages := engine.Pages{Count: chainBytes / 656, EntryLen: 656, LocalStride: 656,
			RemoteStride: 656}
		for i := range uint32(pages.Count) {
			pages.Local, pages.Remote = append(pages.Local, (i*7)%uint32(pages.Count)),
				append(pages.Remote, (i*5)%uint32(pages.Count))
		}
		run(engine.Read, func(tr *engine.Transfer) error { return tr.AddPages(local, m, pages) })
		got := readCard(t, hbm)
		pattern := pages.Pattern()
		for i := range pages.Count {
			if !bytes.Equal(got[pattern.Local.At(i):][:656], want[pattern.Remote.At(i):][:656]) {
				t.Fatalf("%s: entry %d has come back with other bytes", name, i)
			}
		}
		run(engine.Write, all)
	}
	onDisk, err := os.ReadFile(filepath.Join(dir, "file"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(onDisk, readCard(t, hbm)), "the file has what the device has")

	lease, err := region.LeaseRanges([]engine.Range{{Off: 4096, Len: 4096}}, engine.LeaseOptions{})
	require.NoError(t, err)
	require.NoError(t, lease.Revoke(t.Context()))
}

func writeCard(t *testing.T, seg driver.Segment, b []byte) {
	t.Helper()
	d, err := openCard(seg.Device)
	if err == nil {
		err = d.Write(seg.Addr, b)
	}
	require.NoError(t, err)
}

func readCard(t *testing.T, seg driver.Segment) []byte {
	t.Helper()
	b := make([]byte, seg.Len)
	d, err := openCard(seg.Device)
	if err == nil {
		err = d.Read(b, seg.Addr)
	}
	require.NoError(t, err)
	return b
}
