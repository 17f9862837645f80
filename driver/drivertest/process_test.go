// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// TestProcess leads a second process through its orders, stops, continues and
// kills it.
func TestProcess(t *testing.T) {
	h := memHarness.withDefaults()
	p := startProcess(t, h)
	far := &side{TB: t, party: p, name: "far", limit: h.Limit}
	far.must(request{Do: "open"})
	m := far.share(10000)
	m.paint(1)
	m.expect("after paint")
	got := far.must(request{Do: "get", Region: m.id, Off: 100, Len: 50}).Data
	if !bytes.Equal(got, m.want[100:150]) {
		t.Errorf("get: %x, want %x", got, m.want[100:150])
	}
	if err := p.freeze(); err != nil {
		t.Fatal(err)
	}
	answered := make(chan struct{})
	go func() { far.must(request{Do: "token", Region: m.id}); close(answered) }()
	select {
	case <-answered:
		t.Error("a frozen process answers")
	case <-time.After(50 * time.Millisecond):
	}
	if err := p.thaw(); err != nil {
		t.Fatal(err)
	}
	<-answered
	if r := far.must(request{Do: "close"}); len(r.Faults) > 0 {
		t.Errorf("faults: %q", r.Faults)
	}
	if err := p.kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.do(request{Do: "addr"}).Err; !errors.Is(err, errGone) {
		t.Errorf("order to a killed process: %v, want %v", err, errGone)
	}
}

// TestProcessIsStartedByTheHarness: elsewhere, and over the same pipes.
func TestProcessIsStartedByTheHarness(t *testing.T) {
	h := memHarness.withDefaults()
	dir := t.TempDir()
	h.Start = func(c *exec.Cmd) error {
		c.Dir = dir
		return c.Start()
	}
	p := startProcess(t, h)
	far := &side{TB: t, party: p, name: "far", limit: h.Limit}
	far.must(request{Do: "open"})
	if got, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p.cmd.Process.Pid)); err != nil ||
		got != dir {
		t.Errorf("the process is in %q, %v; want %q", got, err, dir)
	}
	if r := far.must(request{Do: "close"}); len(r.Faults) > 0 {
		t.Errorf("faults: %q", r.Faults)
	}
}
