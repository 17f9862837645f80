// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
)

// A frozen owner of foreign memory cannot pull. What it has not begun is
// withdrawn, and never lands when it goes on.
func TestFrozenOwnerDoesNotHoldUpCancel(t *testing.T) {
	o := startOwner(t, "foreign", 0)
	b := open(t, Config{})
	m, mem := share(t, b, backendtest.ForeignMemory, ownerBytes)
	p := dial(t, b, o.addr)
	key, size, err := p.Import(o.token)
	if err != nil {
		t.Fatal(err)
	}
	o.freeze(t)
	fill(mem, 0xEE)
	d := []backends.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}
	if err := p.Submit(backends.Write, 1, d); err != nil {
		t.Fatal(err)
	}
	time.Sleep(5 * time.Millisecond) // until the request is posted
	p.Cancel(1)
	wantError(t, "cancelled write to a frozen owner", await(t, b, 1), backends.ErrAborted)
	o.thaw(t)
	fill(mem, 0)
	if err := p.Submit(backends.Read, 2, d); err != nil {
		t.Fatal(err)
	}
	if err := await(t, b, 2); err != nil {
		t.Fatal(err)
	}
	if bytes.IndexByte(mem, 0xEE) >= 0 {
		t.Error("a cancelled write landed when the owner went on")
	}
}

func TestFrozenOwnerDoesNotHoldUpClose(t *testing.T) {
	for _, kind := range []string{"foreign", "shared"} {
		o := startOwner(t, kind, 0)
		b := open(t, Config{CloseMax: 300 * time.Millisecond})
		m, _ := share(t, b, backendtest.HostMemory, ownerBytes)
		p := dial(t, b, o.addr)
		key, size, err := p.Import(o.token)
		if err != nil {
			t.Fatal(err)
		}
		o.freeze(t)
		if err := p.Submit(backends.Write, 1, []backends.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if err := p.Close(); err != nil {
			t.Errorf("%s: close: %v", kind, err)
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("%s: close against a frozen owner took %v", kind, took)
		}
		if err := await(t, b, 1); err != nil {
			wantError(t, kind+": outstanding write", err, backends.ErrClosed)
		}
	}
}

// An owner that froze in the middle of a pull may still read when it goes on: a
// cancel waits for it, and Close does for CloseMax.
func TestFrozenOwnerInMidPull(t *testing.T) {
	o := startOwner(t, "foreign", 0)
	b := open(t, Config{CloseMax: 150 * time.Millisecond})
	m, _ := share(t, b, backendtest.HostMemory, ownerBytes)
	for _, goesOn := range []bool{true, false} {
		p := dial(t, b, o.addr)
		key, size, err := p.Import(o.token)
		if err != nil {
			t.Fatal(err)
		}
		o.freeze(t)
		if err := p.Submit(backends.Write, 1, []backends.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}); err != nil {
			t.Fatal(err)
		}
		taken := 0
		for end := time.Now().Add(5 * time.Second); taken == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
			for i := range pullMax { // what the owner would have done before it froze
				if word(p.place(i), pullStateAt).CompareAndSwap(pullPosted, pullTaken) {
					taken++
				}
			}
		}
		p.Cancel(1)
		time.Sleep(5 * time.Millisecond)
		var done [1]backends.Completion
		if n, _ := b.Poll(done[:]); n != 0 {
			t.Fatalf("cancel completed with %v while the owner may still read", done[0].Err)
		}
		if goesOn {
			o.thaw(t)
			wantError(t, "cancel when the owner went on", await(t, b, 1), backends.ErrAborted)
			_ = p.Close()
			continue
		}
		begin := time.Now()
		_ = p.Close()
		if took := time.Since(begin); took < 100*time.Millisecond || took > 5*time.Second {
			t.Errorf("close took %v, want CloseMax", took)
		}
		wantError(t, "write that close gave up", await(t, b, 1), backends.ErrClosed)
	}
}

func TestFrozenOwnerDoesNotHoldUpImport(t *testing.T) {
	o := startOwner(t, "shared", 0)
	b := open(t, Config{DialTimeout: time.Second})
	p := dial(t, b, o.addr)
	o.freeze(t)
	_, _, err := p.Import(o.token)
	wantError(t, "import from a frozen owner", err, backends.ErrTimeout)
	o.thaw(t)
	if _, _, err := p.Import(o.token); err != nil {
		t.Errorf("import from an owner that went on: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	o.freeze(t)
	_, err = b.Connect(ctx, o.addr)
	wantError(t, "connect to a frozen owner", err, context.DeadlineExceeded)
}

func TestKilledOwnerEndsItsTransfers(t *testing.T) {
	o := startOwner(t, "foreign", 0)
	b := open(t, Config{})
	m, _ := share(t, b, backendtest.HostMemory, ownerBytes)
	p := dial(t, b, o.addr)
	key, size, err := p.Import(o.token)
	if err != nil {
		t.Fatal(err)
	}
	o.freeze(t)
	d := []backends.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: key}}
	if err := p.Submit(backends.Write, 1, d); err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	wantError(t, "write to a killed owner", await(t, b, 1), backends.ErrPeerLost)
	wantError(t, "submit afterwards", p.Submit(backends.Write, 2, d), backends.ErrPeerLost)
}

func TestOtherUsersAreRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("not root: the refusal of another user is not exercised")
		return
	}
	o := startOwner(t, "shared", 65534)
	b := open(t, Config{})
	_, err := b.Connect(context.Background(), o.addr)
	wantError(t, "connect to another user's backend", err, os.ErrPermission)
	a, err := decodeAddress(o.addr)
	if err != nil {
		t.Fatal(err)
	}
	a.uid = 0 // an address that lies: the kernel does not
	_, err = b.Connect(context.Background(), a.encode())
	wantError(t, "connect to another user's backend by a forged address", err, os.ErrPermission)
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}
