// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestShowBesideArm sends while the receiver falls asleep.
func TestShowBesideArm(t *testing.T) {
	page := testkit.MemoryOutsideGo(t, int(connectionBytes(1<<12)))
	out, in := sender{ring: ringOf(page, 0)}, receiver{ring: ringOf(page, 0)}
	msgs := make([]driver.Message, 2)
	reserve := func() entry {
		e, err := out.reserve([]byte("a message"))
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	next := reserve()
	testkit.OneSideSees(t, in.arm, func() bool { return out.show(next, true) }, func() {
		out.armed.Store(0)
		if n, _ := in.receive(1, msgs); n != 1 {
			t.Fatalf("%d messages, want 1", n)
		}
		next = reserve()
	})
}

// TestReserveBesideReceive asks for room while the receiver makes some.
func TestReserveBesideReceive(t *testing.T) {
	page := testkit.MemoryOutsideGo(t, int(connectionBytes(1<<12)))
	out, in := sender{ring: ringOf(page, 0)}, receiver{ring: ringOf(page, 0)}
	msg := make([]byte, 1<<11)
	msgs := make([]driver.Message, 2)
	send := func() bool {
		e, err := out.reserve(msg)
		if err == nil {
			out.show(e, true)
		}
		return err == nil
	}
	for send() {
	}
	in.arm()
	took := func() (wakes bool) {
		_, wakes = in.receive(1, msgs)
		return wakes
	}
	testkit.OneSideSees(t, send, took, func() {
		for send() {
		}
		out.waiting.Store(0)
	})
}
