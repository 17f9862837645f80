// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// followData checks that each message comes after its data, in order, and whole.
func followData(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	for i := range 12 {
		n := uint64(i) * 50000 // from a message alone to many slices
		var descs []driver.Desc
		if n > 0 {
			fill(l.local[:n], uint64(i))
			descs = append(descs, driver.Desc{Len: n})
		}
		msg := make([]byte, i*372)
		fill(msg, uint64(i))
		tag := l.submit(t, driver.Write, msg, descs...)
		notif := l.notif(t)
		if !bytes.Equal(notif.Data, msg) || notif.Conn != l.back.ID() {
			t.Fatalf("message %d: %d bytes from %d", i, len(notif.Data), notif.Conn)
		}
		if !bytes.Equal(l.local[:n], l.remote[:n]) {
			t.Fatalf("message %d came before its data", i)
		}
		require.NoError(t, l.outcome(t, tag))
	}
	long := batchOf(driver.Write, nil, make([]byte, NotifMax+1))
	if err := l.conn.Submit(1, long); !errors.Is(err,
		driver.ErrBounds) {
		t.Errorf("a message too long: %v", err)
	}
	if err := l.conn.Submit(1, batchOf(driver.Read, nil, []byte{1})); !errors.Is(err,
		driver.ErrBounds) {
		t.Errorf("a message behind a read: %v", err)
	}
}

func numbered(i int) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(i)) }

// creditBounds checks that messages which are not received push back, and that the sender is woken
// when there is room again.
func creditBounds(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	sent, got := 0, 0
	for {
		l.tag++
		err := l.conn.Submit(l.tag, batchOf(driver.Write, nil, numbered(sent)))
		if errors.Is(err, driver.ErrFull) {
			break
		}
		if err != nil || sent > l.shape.config.NotifyMax {
			t.Fatalf("message %d: %v", sent, err)
		}
		sent++
		l.outcome(t, l.tag)
	}
	if sent != l.shape.config.NotifyMax {
		t.Errorf("%d messages are not received, want %d", sent, l.shape.config.NotifyMax)
	}
	woken := make(chan error, 1)
	l.near.Arm()
	go func() { woken <- l.wake.Wait() }()
	take := func() {
		if n := l.notif(t); binary.LittleEndian.Uint64(n.Data) != uint64(got) {
			t.Fatalf("message %d: %x", got, n.Data)
		}
		got++
	}
	take()
	select {
	case err := <-woken:
		require.NoError(t, err)
	case <-time.After(patience):
		t.Fatal("the sender is not woken")
	}
	for end := time.Now().Add(patience); sent < 200 && time.Now().Before(end); {
		l.tag++
		switch err := l.conn.Submit(l.tag, batchOf(driver.Write, nil, numbered(sent))); {
		case err == nil:
			sent++
			l.outcome(t, l.tag)
		case errors.Is(err, driver.ErrFull) && got < sent:
			take()
		case errors.Is(err, driver.ErrFull): // credit is under way
			time.Sleep(20 * time.Microsecond)
		default:
			t.Fatal(err)
		}
	}
	if sent != 200 {
		t.Errorf("no credit comes after %d messages", sent)
	}
	for got < sent {
		take()
	}
}

// notesOutlive checks that messages are there when the connection they came over is gone.
func notifsOutlive(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	id := l.back.ID()
	for i := range 3 {
		require.NoError(t, l.outcome(t, l.submit(t, driver.Write, numbered(i))))
	}
	l.conn.Close()
	l.back.Close()
	l.conn, l.back = nil, nil
	for i := range 3 {
		n, ok := l.far.Receive()
		if !ok || n.Conn != id || !bytes.Equal(n.Data, numbered(i)) {
			t.Fatalf("message %d: %v %+v", i, ok, n)
		}
	}
}

// wakeSleepers checks that a thread which sleeps is woken by what comes, at both ends.
func wakeSleepers(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	for i := range 5 {
		time.Sleep(10 * time.Millisecond) // longer than threads look
		woken := make(chan string, 2)
		l.near.Arm()
		l.far.Arm()
		go func() { _ = l.wake.Wait(); woken <- "near" }()
		go func() { _ = l.farWake.Wait(); woken <- "far" }()
		tag := l.submit(t, driver.Write, numbered(i), driver.Desc{Len: 100})
		for range 2 {
			select {
			case <-woken:
			case <-time.After(patience):
				t.Fatal("somebody is not woken")
			}
		}
		require.NoError(t, l.outcome(t, tag))
		l.notif(t)
	}
}

// TestMalformedMessages changes messages as a peer that means harm would: the owner ends that
// queue pair, and takes nothing of it.
func TestMalformedMessages(t *testing.T) {
	for what, at := range map[string]int{"magic": 0, "kind": 4, "number": 15} {
		t.Run(what, func(t *testing.T) {
			d := fakeDevices(t, 1)
			l := openLink(t, d, testShape{})
			d.fake.Device(0).GarbleNext(at)
			l.tag++
			require.NoError(t,
				l.conn.Submit(l.tag, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
					Notify: []byte("x")}))
			for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
				if n, ok := l.far.News(); ok && n.Kind == PairFailed {
					break
				}
				if time.Now().After(end) {
					t.Fatal("the owner keeps the queue pair")
				}
			}
			if n, ok := l.far.Receive(); ok {
				t.Errorf("message %x", n.Data)
			}
			if got := l.back.Seen(); got != 0 {
				t.Errorf("%d messages were seen", got)
			}
		})
	}
}

// TestRoomIsToldToWhoArmsLater: credit that comes between a refusal and Arm must not be slept
// through.
func TestRoomIsToldToWhoArmsLater(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{})
	sent := 0
	for ; ; sent++ {
		l.tag++
		err := l.conn.Submit(l.tag, batchOf(driver.Write, nil, numbered(sent)))
		if errors.Is(err, driver.ErrFull) {
			break
		}
		require.NoError(t, err)
		require.NoError(t, l.outcome(t, l.tag))
	}
	for range sent {
		l.notif(t)
	}
	for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); {
		// the credit comes meanwhile
		l.near.Drive()
	}
	for end := time.Now().Add(patience); !l.near.Arm(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody says that there is room")
		}
	}
}
