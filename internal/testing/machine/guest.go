// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// guestFolder is a folder that hack/guest/init makes in the guest.
const guestFolder = "/run/sluice-guest"

// InGuest reports whether this is the guest.
func InGuest() bool {
	_, err := os.Stat(guestFolder + "/wire")
	return err == nil
}

// VerbsDevices names n RDMA devices whose first port is active, in the order of their names. In
// the guest these are rxe0 and rxe1, at the ends of wire 0, rxe2 and rxe3, at the ends of
// wire 1. With fewer than n the error is a *driver.UnavailableError.
func VerbsDevices(n int) ([]string, error) {
	const root = "/sys/class/infiniband"
	states, err := filepath.Glob(filepath.Join(root, "*", "ports", "1", "state"))
	if err != nil {
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}
	var names []string
	for _, file := range states {
		state, err := os.ReadFile(file)
		if err == nil && strings.HasSuffix(strings.TrimSpace(string(state)), " ACTIVE") {
			name, _, _ := strings.Cut(strings.TrimPrefix(file, root+"/"), "/")
			names = append(names, name)
		}
	}
	if len(names) < n {
		return nil, &driver.UnavailableError{Backend: "verbs",
			Reason: fmt.Sprintf("%d RDMA devices with an active port, of %d that the test wants",
				len(names), n), Fix: "make guest"}
	}
	return names[:n], nil
}

// Wire joins two devices of the guest. What it does to packets, it does to both ways.
type Wire struct{ number string }

// NewWire is the wire of rxe0 and rxe1 (0), or that of rxe2 and rxe3 (1). Outside of the guest
// the error is a *driver.UnavailableError: no other network is touched.
func NewWire(n int) (Wire, error) {
	if !InGuest() {
		return Wire{}, &driver.UnavailableError{Backend: "verbs",
			Reason: "faults are for wires of the guest alone", Fix: "make guest"}
	}
	return Wire{fmt.Sprint(n)}, nil
}

// Mend takes all faults away.
func (w Wire) Mend() error {
	if err := w.do("clear"); err != nil {
		return err
	}
	return w.do("up")
}

// Down takes the link down at both ends.
func (w Wire) Down() error { return w.do("down") }

// Up takes it up again.
func (w Wire) Up() error { return w.do("up") }

// Loss drops such a part of the packets, as "100%" or "1%", in silence.
func (w Wire) Loss(part string) error { return w.do("loss", part) }

// Delay holds packets back for a time, as "20ms".
func (w Wire) Delay(d string) error { return w.do("delay", d) }

// faultLimit bounds a command, on a machine that is emulated.
const faultLimit = 20 * time.Second

func (w Wire) do(fault ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), faultLimit)
	defer cancel()
	c := exec.CommandContext(ctx, guestFolder+"/wire", append([]string{w.number}, fault...)...)
	c.WaitDelay = faultLimit / 2 // ip and tc hold its pipes, too
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("wire %s %s: %w: %s", w.number, strings.Join(fault, " "), err,
			strings.TrimSpace(string(out)))
	}
	return nil
}
