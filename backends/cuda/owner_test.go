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

	"github.com/sluicehq/sluice/internal/sealed"
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
	page, users, err := sealed.New("test", pageBytes, false)
	if err != nil {
		return err
	}
	w := &wire{conn: conn}
	err = w.send(&head{Kind: sayHello}, nil, limit, page)
	if err == nil {
		_, _, _, err = w.receive()
	}
	if counts && err == nil {
		err = w.count(users, text)
	}
	fmt.Println(err == nil)
	if counts {
		_, err = io.Copy(io.Discard, os.Stdin)
		return err
	}
	return nil
}

// count is a batch that never ends.
func (w *wire) count(users []byte, token string) error {
	opens, err := hex.DecodeString(token)
	if err != nil {
		return err
	}
	if err := w.send(&head{Kind: sayAsk, ID: 1}, opens, limit); err != nil {
		return err
	}
	h, _, _, err := w.receive()
	if err != nil || h.Outcome != outcomeOf(nil) {
		return fmt.Errorf("ask for memory: outcome %d, %w", h.Outcome, err)
	}
	sealed.Word(users, int(8*h.Slot)).Add(1)
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
	_, name, _ := strings.Cut(strings.TrimPrefix(mine, soleMarker), ":")
	other := soleMarker + "65534:" + name
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
