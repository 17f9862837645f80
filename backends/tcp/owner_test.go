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
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
	"github.com/sluicehq/sluice/internal/freeze"
)

// ownerVariable makes the test binary a process that owns memory.
const ownerVariable = "SLUICE_TCP_TEST_OWNER"

const ownerBytes = 16 << 20

// serveOwner says its address and a token, and then obeys: "clear" and "look".
func serveOwner() error {
	b, err := New(Config{Plaintext: true, Listen: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	defer b.Close()
	space, err := backendtest.PopulatedMemory(ownerBytes)
	if err != nil {
		return err
	}
	m, err := b.Register(space.Segment)
	if err != nil {
		return err
	}
	token, err := m.AppendToken(nil)
	if err != nil {
		return err
	}
	fmt.Printf("%x %x\n", b.Addr(), token)
	mem, zeros := space.Segment.Mem, make([]byte, ownerBytes)
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		switch orders.Text() {
		case "clear":
			copy(mem, zeros)
			fmt.Println("cleared")
		case "look":
			fmt.Println(bytes.Equal(mem, zeros))
		}
	}
	return nil
}

type owner struct {
	cmd         *exec.Cmd
	orders      io.Writer
	answers     *bufio.Scanner
	addr, token []byte
}

func startOwner(t *testing.T) *owner {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o := &owner{cmd: exec.Command(exe)}
	o.cmd.Env = append(os.Environ(), ownerVariable+"=1", "GORACE=atexit_sleep_ms=0")
	o.cmd.Stderr = os.Stderr
	orders, err := o.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = orders.Close()
		_ = freeze.Thaw(o.cmd.Process)
		_ = o.cmd.Wait()
	})
	o.orders, o.answers = orders, bufio.NewScanner(out)
	addr, token, _ := strings.Cut(o.hear(t), " ")
	for dst, text := range map[*[]byte]string{&o.addr: addr, &o.token: token} {
		if *dst, err = hex.DecodeString(text); err != nil {
			t.Fatal(err)
		}
	}
	return o
}

func (o *owner) hear(t *testing.T) string {
	t.Helper()
	if !o.answers.Scan() {
		t.Fatalf("the owner has ended: %v", o.answers.Err())
	}
	return o.answers.Text()
}

func (o *owner) obey(t *testing.T, order string) string {
	t.Helper()
	if _, err := fmt.Fprintln(o.orders, order); err != nil {
		t.Fatal(err)
	}
	return o.hear(t)
}

// An owner is frozen in the midst of writes, with its sockets full, and goes on after the writer
// has given up: nothing of what it finds there lands.
func TestFrozenOwnerLandsNothingOfWhoHasGivenUp(t *testing.T) {
	o := startOwner(t)
	b := open(t, Config{CloseMax: 50 * time.Millisecond})
	m, local := share(t, b, ownerBytes)
	fill(local, 0xEE)
	failed := 0
	for round := range 8 {
		p := dial(t, b, o.addr)
		key, size, err := p.Import(o.token)
		if err != nil {
			t.Fatal(err)
		}
		d := []backends.Desc{{Len: size, LocalKey: m.key, RemoteKey: key}}
		for tag := range uint64(16) {
			if err := p.Submit(backends.Write, tag, d); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Duration(round) * 700 * time.Microsecond)
		if err := freeze.Process(o.cmd.Process); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		var done [16]backends.Completion
		n, err := b.Poll(done[:])
		if n != 16 || err != nil {
			t.Fatalf("%d of 16 completions after Close (%v)", n, err)
		}
		for _, c := range done {
			if c.Err != nil {
				failed++
				wantError(t, "a write to a frozen owner", c.Err, backends.ErrClosed)
			}
		}
		// What lands from here on is wrong. The owner clears its memory as the first thing that it
		// does, unless what it had in its sockets comes before that: then the look may miss it
		// in one round, and hardly in all.
		if err := freeze.Thaw(o.cmd.Process); err != nil {
			t.Fatal(err)
		}
		o.obey(t, "clear")
		for range 10 {
			time.Sleep(5 * time.Millisecond)
			if o.obey(t, "look") != "true" {
				t.Fatalf("round %d: bytes landed after Close had returned", round)
			}
		}
	}
	if failed == 0 {
		t.Error("no write was in flight when the owner was frozen")
	}
}
