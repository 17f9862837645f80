// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// block has a process die while it puts a message into the near queue of a backend that does not
// know it.
func block(t *testing.T, b *Backend) {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "forger")
	const csrc = "../../csrc/ucx/"
	out, err := exec.Command("gcc", "-std=gnu11", "-I"+csrc, "-o", exe,
		csrc+"testdata/forger.c", csrc+"load.c", "-ldl").CombinedOutput()
	require.NoError(t, err, "%s", out)
	cmd := exec.Command(exe, "none")
	cmd.Env = append(os.Environ(), "UCX_TLS=posix,sysv", "UCX_MM_SEG_SIZE=16k",
		"UCX_MM_FIFO_SIZE=256")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = fmt.Fprintf(in, "connect %x\ndie\n", b.address.near[0])
	require.NoError(t, err)
	require.Error(t, cmd.Wait(), "it did not die")
}

// TestTimedBlockedQueue blocks the queue of shared memory that all near peers of a backend share.
// The backend finds that out from the silence of a live peer, and ends its near connections; from
// then on it, and peers that know it by its old address, use the other context.
func TestTimedBlockedQueue(t *testing.T) {
	leak.Check(t)
	cfg := Config{Transports: "posix,sysv,cma,self,tcp", Devices: "lo", Grace: shortGrace}
	connect := func(from, to *Backend) driver.Peer {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		p, err := from.Connect(ctx, to.Addr())
		require.NoError(t, err)
		return p
	}
	b, x := openReal(t, cfg), openReal(t, cfg)
	first := connect(x, b)
	// Where the machine stands still for Grace a peer is reached the other way: then once more.
	for end := time.Now().Add(patience); !first.(*peer).l.near; first = connect(x, b) {
		require.True(t, time.Now().Before(end), "no peer is near")
		require.NoError(t, x.Close())
		require.NoError(t, b.Close())
		b, x = openReal(t, cfg), openReal(t, cfg)
	}
	block(t, b)
	select {
	case <-first.Lost():
	case <-time.After(patience):
		t.Fatal("a peer of the blocked queue is not told")
	}
	again := connect(x, b)
	require.False(t, again.(*peer).l.near)
	require.Contains(t, again.(*peer).where(), "did not answer over shared memory")
	wrote(t, x, b, again)
	eventually(t, "the backend knows", b.near.over.Load)
	back := connect(b, x)
	require.False(t, back.(*peer).l.near)
	require.Contains(t, back.(*peer).where(), blockedText)
	wrote(t, b, x, back)
	require.NoError(t, first.Close())
	require.NoError(t, x.Close())
	require.NoError(t, b.Close())
}

// TestTimedBlockedQueueAlone has no other context to use.
func TestTimedBlockedQueueAlone(t *testing.T) {
	leak.Check(t)
	cfg := Config{Transports: NearTransports, Grace: shortGrace}
	b, x := openReal(t, cfg), openReal(t, cfg)
	block(t, b)
	b.near.suspect()
	eventually(t, "the backend knows", b.near.over.Load)
	_, err := b.Connect(t.Context(), x.Addr())
	require.ErrorIs(t, err, driver.ErrNoRoute)
	require.ErrorContains(t, err, "open the backend anew")
	require.NoError(t, b.Close())
	require.NoError(t, x.Close())
}

// wrote moves some bytes over a connection.
func wrote(t *testing.T, from, to *Backend, p driver.Peer) {
	t.Helper()
	bytes := make([][]byte, 2)
	var keys []uint32
	var token []byte
	for i, b := range []*Backend{from, to} {
		bytes[i] = make([]byte, 4096)
		m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: 4096, Mem: bytes[i],
			Secret: [16]byte{1}})
		require.NoError(t, err)
		defer func() { require.NoError(t, m.Close()) }()
		keys = append(keys, m.Key())
		token, err = m.AppendToken(nil)
		require.NoError(t, err)
	}
	bytes[0][17] = 17
	key, _, err := p.Import(token)
	require.NoError(t, err)
	d := []driver.Desc{{Len: 4096, LocalKey: keys[0], RemoteKey: key}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}))
	var done [1]driver.Completion
	eventually(t, "the write ends", func() bool {
		n, err := from.Poll(done[:])
		require.NoError(t, err)
		return n == 1
	})
	require.NoError(t, done[0].Err)
	require.Equal(t, bytes[0], bytes[1])
}
