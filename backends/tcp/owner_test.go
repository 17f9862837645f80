// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// ownerVariable makes the test binary a process that owns memory.
const ownerVariable = "SLUICE_TCP_TEST_OWNER"

const ownerBytes = 16 << 20

// sharedFile maps a file, so that a test sees the memory of an owner that is frozen.
func sharedFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(ownerBytes); err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, ownerBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// serveOwner says its address and a token, and serves until its input ends.
func serveOwner(path string) error {
	b, err := New(Config{Plaintext: true, Listen: "127.0.0.1:0", PeersMax: 1 << 14,
		Handshake: limit})
	if err != nil {
		return err
	}
	defer b.Close()
	mem, err := sharedFile(path)
	if err != nil {
		return err
	}
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: ownerBytes, Mem: mem})
	if err != nil {
		return err
	}
	token, err := m.AppendToken(nil)
	if err != nil {
		return err
	}
	fmt.Printf("%x %x\n", b.Addr(), token)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

type owner struct {
	cmd         *exec.Cmd
	mem         []byte
	addr, token []byte
}

func startOwner(t testing.TB) *owner {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "memory")
	o := &owner{cmd: exec.Command(exe)}
	o.mem, err = sharedFile(path)
	require.NoError(t, err)
	o.cmd.Env = append(os.Environ(), ownerVariable+"="+path, "GORACE=atexit_sleep_ms=0")
	o.cmd.Stderr = os.Stderr
	orders, err := o.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := o.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, o.cmd.Start())
	t.Cleanup(func() {
		_ = orders.Close()
		_ = testkit.Thaw(o.cmd.Process)
		_ = o.cmd.Wait()
		_ = unix.Munmap(o.mem)
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	addr, token, _ := strings.Cut(strings.TrimSpace(line), " ")
	for dst, text := range map[*[]byte]string{&o.addr: addr, &o.token: token} {
		*dst, err = hex.DecodeString(text)
		require.NoError(t, err)
	}
	return o
}

// An owner is frozen in the midst of writes, with its sockets full, and goes on after the writer
// has given up: nothing of what it finds there lands, but for the piece that each of its two
// readers was about to hand to the kernel, or to copy, at that moment.
func TestTimedFrozenOwnerLandsNothingOfWhoHasGivenUp(t *testing.T) {
	o := startOwner(t)
	b := open(t, Config{CloseMax: 50 * time.Millisecond})
	m, local := share(t, b, ownerBytes)
	fill(local, 0xEE)
	const inHand = 2 * partBytes
	failed := 0
	for round := range 8 {
		p := dial(t, b, o.addr)
		key, size, err := p.Import(o.token)
		require.NoError(t, err)
		d := []driver.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
		for tag := range uint64(16) {
			require.NoError(t, p.Submit(tag, &driver.Batch{Op: driver.Write, Descs: d}))
		}
		time.Sleep(time.Duration(round) * 700 * time.Microsecond)
		require.NoError(t, testkit.Freeze(o.cmd.Process))
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		var done [16]driver.Completion
		n, err := b.Poll(done[:])
		if n != 16 || err != nil {
			t.Fatalf("%d of 16 completions after Close (%v)", n, err)
		}
		for _, c := range done {
			if c.Err != nil {
				failed++
				wantError(t, "a write to a frozen owner", c.Err, driver.ErrClosed)
			}
		}
		clear(o.mem)
		require.NoError(t, testkit.Thaw(o.cmd.Process))
		time.Sleep(100 * time.Millisecond)
		if n := bytes.Count(o.mem, []byte{0xEE}); n > inHand {
			testkit.FatalBroken(t,
				"round %d: %d bytes landed after Close had returned, at most %d "+
					"were in hand", round, n, inHand)
		}
	}
	if failed == 0 {
		t.Error("no write was in flight when the owner was frozen")
	}
}
