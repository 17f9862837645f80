// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// ownerVariable makes the test binary an owner of memory: it prints its address
// and a token, and stays until its input ends.
const ownerVariable = "SLUICE_SHM_TEST_OWNER"

const ownerBytes = 4 << 20

type owner struct {
	cmd         *exec.Cmd
	in          io.Writer
	out         *bufio.Reader
	addr, token []byte
}

func serveOwner(kind string) int {
	alloc := drivertest.HostMemory
	if kind == "foreign" {
		alloc = drivertest.ForeignMemory
	}
	space, err := alloc(ownerBytes)
	if err == nil {
		err = serveSpace(space)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// offer registers memory and says where it is to be had.
func offer(cfg Config, space *drivertest.Space) (*Backend, driver.Memory, error) {
	b, err := New(cfg)
	if err != nil {
		return nil, nil, err
	}
	m, err := b.Register(space.Segment)
	if err != nil {
		return nil, nil, err
	}
	token, err := m.AppendToken(nil)
	if err != nil {
		return nil, nil, err
	}
	fmt.Printf("%x %x\n", b.Addr(), token)
	return b, m, nil
}

func serveSpace(space *drivertest.Space) error {
	b, m, err := offer(Config{}, space)
	if err != nil {
		return err
	}
	for in := bufio.NewReader(os.Stdin); ; {
		if _, err := in.ReadString('\n'); err != nil {
			return b.Close()
		}
		if err := m.(*memory).arena.shared.Renew(context.Background(), 0, ownerBytes); err != nil {
			return err
		}
		fmt.Println("renewed")
	}
}

// startSelf runs this binary as another process, of another user if uid is not 0. It ends with the
// test.
func startSelf(t *testing.T, kind string, uid uint32) (*exec.Cmd, io.Writer, *bufio.Reader) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	// The race detector would have the process linger for a second.
	cmd.Env = append(os.Environ(), ownerVariable+"="+kind, "GORACE="+os.Getenv("GORACE")+
		" atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = in.Close()
		done := time.AfterFunc(5*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		done.Stop()
	})
	return cmd, in, bufio.NewReader(out)
}

// startOwner starts an owner process, as another user if uid is not 0.
func startOwner(t *testing.T, kind string, uid uint32) *owner {
	t.Helper()
	o := &owner{}
	o.cmd, o.in, o.out = startSelf(t, kind, uid)
	line, err := o.out.ReadString('\n')
	require.NoError(t, err)
	addr, token, _ := strings.Cut(strings.TrimSpace(line), " ")
	o.addr, _ = hex.DecodeString(addr)
	o.token, _ = hex.DecodeString(token)
	return o
}

// renew has the owner put fresh pages under its memory.
func (o *owner) renew(t *testing.T) {
	t.Helper()
	fmt.Fprintln(o.in)
	line, err := o.out.ReadString('\n')
	if err != nil || line != "renewed\n" {
		t.Fatalf("renew: %q, %v", line, err)
	}
}

// freeze stops the owner and returns when all its threads stand.
func (o *owner) freeze(t *testing.T) {
	t.Helper()
	require.NoError(t, testkit.Freeze(o.cmd.Process))
}

func (o *owner) thaw(t *testing.T) {
	t.Helper()
	require.NoError(t, testkit.Thaw(o.cmd.Process))
}

// limit is for a machine that is very busy.
const limit = 20 * time.Second

// open makes a backend that ends with the test.
func open(t testing.TB, cfg Config) *Backend {
	t.Helper()
	return openBy(t, clock.Host(), cfg)
}

// hasty is a backend whose revokes hardly wait for silent peers, for tests in which those stand.
func hasty(t testing.TB) *Backend {
	t.Helper()
	b := open(t, Config{})
	b.cfg.Grace = time.Millisecond
	return b
}

// openBy is open with a clock of the test. One that stands runs while the backend closes.
func openBy(t testing.TB, c clock.Clock, cfg Config) *Backend {
	t.Helper()
	b, err := newBackend(cfg, c)
	require.NoError(t, err)
	t.Cleanup(func() {
		if manual, ok := c.(*testkit.Clock); ok {
			defer manual.Run(time.Second)()
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return b
}

// share allocates and registers memory that ends with the test, after the backend.
func share(t testing.TB, b *Backend, alloc drivertest.Allocator, n uint64) (*memory, []byte) {
	t.Helper()
	space, err := alloc(n)
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close(); _ = space.Free() })
	seg := space.Segment
	seg.Secret[0] = byte(n)
	m, err := b.Register(seg)
	require.NoError(t, err)
	return m.(*memory), seg.Mem
}

// again registers the bytes of memory that was revoked once more, under the same key.
func again(t testing.TB, m *memory) *memory {
	t.Helper()
	next := alike(t, m)
	require.Equal(t, m.key, next.key)
	return next
}

// alike registers the bytes of a memory once more.
func alike(t testing.TB, m *memory) *memory {
	t.Helper()
	seg := driver.Segment{Kind: driver.DRAM, Len: uint64(len(m.bytes)), Mem: m.bytes,
		SharedOff: m.off, Secret: m.secret}
	if m.arena != nil {
		seg.Shared = m.arena.shared
	}
	next, err := m.b.Register(seg)
	require.NoError(t, err)
	return next.(*memory)
}

// cutShort revokes with little time, and returns the error.
func cutShort(t testing.TB, m *memory) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	return m.Revoke(ctx)
}

// dial connects. Where the DialTimeout of one of the two is too short for a busy machine it does so
// again.
func dial(t testing.TB, b *Backend, addr []byte) *peer {
	t.Helper()
	for end := time.Now().Add(limit); ; {
		p, err := b.Connect(t.Context(), addr)
		if err == nil {
			return p.(*peer)
		}
		again := errors.Is(err, driver.ErrTimeout) || errors.Is(err, driver.ErrPeerLost)
		if !again || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// take imports memory by its token, as often as dial connects.
func take(t testing.TB, p *peer, token []byte) (key uint32, size uint64) {
	t.Helper()
	for end := time.Now().Add(limit); ; {
		key, size, err := p.Import(token)
		if err == nil {
			return key, size
		}
		if !errors.Is(err, driver.ErrTimeout) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// await polls for one completion.
func await(t testing.TB, b *Backend, tag uint64) error {
	t.Helper()
	var done [1]driver.Completion
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(
		20 * time.Microsecond) {
		n, err := b.Poll(done[:])
		require.NoError(t, err)
		if n == 1 {
			require.EqualValues(t, tag, done[0].Tag, "completion of tag")
			return done[0].Err
		}
	}
	t.Fatalf("tag %d did not complete", tag)
	return nil
}

func wantError(t *testing.T, what string, err, want error) {
	t.Helper()
	require.ErrorIs(t, err, want, "%s", what)
}
