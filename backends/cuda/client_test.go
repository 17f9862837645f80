// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// socketPair is two ends of a connection as processes have between them.
func socketPair(t *testing.T) (ends [2]*net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		conn, err := net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		ends[i] = conn.(*net.UnixConn)
		t.Cleanup(func() { _ = conn.Close() })
	}
	return ends
}

// TestGoodbyeBehindReset has a process say goodbye and close over a hint that it has not read: the
// kernel reports a reset first, and the goodbye counts all the same.
func TestGoodbyeBehindReset(t *testing.T) {
	for what, polite := range map[string]bool{"goodbye": true, "nothing": false} {
		t.Run(what, func(t *testing.T) {
			ends := socketPair(t)
			g := &client{wire: wire{conn: ends[0]}}
			g.hint()
			theirs := wire{conn: ends[1]}
			if polite {
				require.NoError(t, theirs.send(&head{Kind: sayBye}, nil, limit))
			}
			require.NoError(t, ends[1].Close())
			require.Equal(t, polite, g.listen())
		})
	}
}

// TestRevokeBesideABusyDevice has the device wait for the program while a Revoke takes memory away
// from a silent process: the fence ends with its context, and the next one finds the proof.
func TestRevokeBesideABusyDevice(t *testing.T) {
	onStandIn(t)
	r, silent := newFarRig(t, testConfig())
	d, block := r.shared(silent, 1<<20)
	want, before := r.content(d), block.id
	stuck := silent.p.remote(d.key)
	require.True(t, stuck.enter())
	defer stuck.leave()
	busy := newProducer(t)
	r.hold(busy)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	revoked := make(chan error, 1)
	go func() { revoked <- d.m.Revoke(ctx) }()
	select {
	case err := <-revoked:
		require.ErrorIs(t, err, driver.ErrTimeout)
	case <-time.After(limit):
		r.release()
		t.Fatal("the Revoke waits for what the program has begun on the device")
	}
	l := r.local(drivertest.HostMemory, 4096)
	require.ErrorIs(t, r.p.Submit(99, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{
		{Len: 1, LocalKey: l.m.key, RemoteKey: d.key},
	}}), driver.ErrRevoked)
	r.release()
	require.NoError(t, d.m.Revoke(context.Background()))
	require.Equal(t, before+1, block.id, "the memory is replaced once")
	r.same("the content after a revoke", r.content(d), want)
	busy.close()
}

// forkOwner has a child inherit all connections of a backend, and live until the input of this
// process ends.
func forkOwner(b *Backend) error {
	cmd := exec.Command("cat")
	cmd.Stdin = os.Stdin
	b.server.mu.Lock()
	for g := range b.server.clients {
		f, err := g.wire.conn.File()
		if err != nil {
			return err
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	b.server.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	fmt.Println("forked")
	return nil
}

// TestOwnerThatForked kills an owner of which a child holds the connections open.
func TestOwnerThatForked(t *testing.T) {
	r := newRig(t, peersConfig())
	o := startOwner(t)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	p, err := r.b.Connect(ctx, o.addr)
	require.NoError(t, err)
	_, err = fmt.Fprintln(o.in, "fork")
	require.NoError(t, err)
	said, err := o.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "forked\n", said)
	require.NoError(t, o.Kill())
	select {
	case <-p.Lost():
	case <-time.After(limit):
		t.Fatal("the death of a process is not noticed while its child lives")
	}
	require.NoError(t, p.Close())
}

// owner is a process that has memory for others.
type owner struct {
	*os.Process
	in          *os.File
	out         *bufio.Reader
	addr, token []byte
}
