// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// park sleeps on the backend's descriptor as the engine does: arm, and sleep
// only if there is nothing already. Past the limit it returns errLate.
func (h *host) park(limit time.Duration) error {
	h.parked.Add(1)
	ready, err := h.b.Arm()
	if err != nil || ready {
		return err
	}
	return sleepOn(h.b.FD(), limit)
}

// sleepOn waits until an eventfd is readable and drains it.
func sleepOn(fd int, limit time.Duration) error {
	woken, err := readable(fd, limit)
	if err != nil {
		return err
	}
	if !woken {
		return errLate
	}
	var count [8]byte
	if _, err := unix.Read(fd, count[:]); err != nil && err != unix.EAGAIN {
		return fmt.Errorf("drain the backend's eventfd: %w", err)
	}
	return nil
}

func readable(fd int, limit time.Duration) (bool, error) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for end := time.Now().Add(limit); ; {
		n, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds())))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("poll the backend's eventfd: %w", err)
		}
		if n == 1 && fds[0].Revents&unix.POLLIN == 0 {
			return false, fmt.Errorf("poll the backend's eventfd: revents %#x", fds[0].Revents)
		}
		return n == 1, nil
	}
}
