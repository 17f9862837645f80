// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// ownerVariable makes the test binary an owner of memory, which prints its address and a token and
// stays until its input ends; knockVariable one that knocks at an address.
const ownerVariable, knockVariable = "SLUICE_CUDA_TEST_OWNER", "SLUICE_CUDA_TEST_KNOCK"

func dialUnix(at *net.UnixAddr) (*net.UnixConn, error) { return net.DialUnix(at.Net, nil, at) }

func serveOwner() error {
	b, err := New(peersConfig())
	if err != nil {
		return err
	}
	seg, owner, err := b.AllocDevice(0, 1<<20)
	if err != nil {
		return err
	}
	m, err := b.Register(seg)
	if err != nil {
		return err
	}
	token, err := m.AppendToken(nil)
	if err != nil {
		return err
	}
	fmt.Printf("%x %x\n", b.Addr(), token)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if err := forkOwner(b); err != nil {
			return err
		}
	}
	return errors.Join(b.Close(), owner.Close())
}

// knock says hello to an address, and prints whether it was let in. With a token behind the address
// it counts a batch for what that opens, says so, and waits for the end of its input.
func knock(address string) error {
	address, text, counts := strings.Cut(address, " ")
	at, err := socketOf([]byte(address))
	if err != nil {
		return err
	}
	conn, err := dialUnix(at)
	if err != nil {
		return err
	}
	page, users, err := hostmem.NewSealed("test", pageBytes, false)
	if err != nil {
		return err
	}
	w := &wire{conn: conn}
	err = w.join(page)
	if counts && err == nil {
		var opens []byte
		if opens, err = hex.DecodeString(text); err == nil {
			var slot uint32
			slot, err = w.ask(opens)
			hostmem.SharedWord(users, int(8*slot)).Add(1) // a batch that never ends
		}
	}
	fmt.Println(err == nil)
	if counts {
		_, err = io.Copy(io.Discard, os.Stdin)
		return err
	}
	return nil
}

// startOwner starts an owner in a process of its own.
func startOwner(t *testing.T) *owner {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), ownerVariable+"=1", "GORACE="+os.Getenv("GORACE")+
		" atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	theirs, in, err := os.Pipe()
	require.NoError(t, err)
	cmd.Stdin = theirs
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, errors.Join(cmd.Start(), theirs.Close()))
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = in.Close()
		late := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
	})
	o := &owner{Process: cmd.Process, in: in, out: bufio.NewReader(stdout)}
	text, err := o.out.ReadString('\n')
	require.NoError(t, err)
	a, s, _ := strings.Cut(strings.TrimSpace(text), " ")
	var err2 error
	o.addr, err = hex.DecodeString(a)
	o.token, err2 = hex.DecodeString(s)
	err = errors.Join(err, err2)
	require.NoError(t, err)
	return o
}

// TestOtherUsers has a process of another user knock, with the address of ours and with one that
// lies.
func TestOtherUsers(t *testing.T) {
	r := newRig(t, peersConfig())
	mine := string(r.b.Addr())
	_, name, _ := strings.Cut(strings.TrimPrefix(mine, peersPrefix), ":")
	other := peersPrefix + "65534:" + name
	if unix.Getuid() != 65534 {
		_, err := r.b.Connect(context.Background(), []byte(other))
		sameError(t, "connect to a process of another user", err, os.ErrPermission)
	}
	if unix.Getuid() != 0 {
		t.Log("not root: that another user is let in nowhere is not exercised")
		return
	}
	for uid, want := range map[uint32]string{0: "true\n", 65534: "false\n"} {
		cmd := exec.Command("/proc/self/exe")
		address := mine
		if uid != 0 {
			address = other
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid,
				Gid: uid}}
		}
		cmd.Env = append(os.Environ(), knockVariable+"="+address)
		cmd.Stderr = os.Stderr
		if out, err := cmd.Output(); err != nil || string(out) != want {
			t.Errorf("uid %d: let in: %q, %v, want %q", uid, out, err, want)
		}
	}
}

// TestProcessThatDiesInABatch has a process be killed with a batch under way. Its copies may go on,
// in a context that a child of it keeps: other memory comes under the range before a revoke ends.
// Then the process keeps no place.
func TestProcessThatDiesInABatch(t *testing.T) {
	r, far := newFarRig(t, testConfig())
	d, o := r.shared(far, 1<<20)
	token, err := d.m.AppendToken(nil)
	require.NoError(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(),
		knockVariable+"="+string(r.b.Addr())+" "+hex.EncodeToString(token))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	text, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "true\n", text, "a batch is counted")
	memory := func() uint64 {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.id
	}
	before, want := memory(), r.content(d)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	_ = in.Close()
	require.NoError(t, d.m.Revoke(t.Context()))
	if memory() == before {
		testkit.ErrorBroken(t, "the memory that a dead process may write to is in use")
	}
	r.same("the memory that came", r.content(d), want)
	require.Eventually(t, func() bool {
		return len(r.b.clients()) == 1
	}, limit, time.Millisecond, "the dead process keeps its place")
}

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

// TestRevokeBesideABusyDevice has the device wait for the program while a revoke takes memory away
// from a silent process: the revoke ends with its context, and the next one finds the proof.
func TestRevokeBesideABusyDevice(t *testing.T) {
	onStandIn(t)
	r, silent := newFarRig(t, testConfig())
	d, block := r.shared(silent, 1<<20)
	want, before := r.content(d), block.id
	stuck := silent.remote(d.key)
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
		t.Fatal("the revoke waits for what the program has begun on the device")
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
