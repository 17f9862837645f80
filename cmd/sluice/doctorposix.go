// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
)

const posixName = "posix"

// posixChecks says by what files are read and written, by trying it.
func posixChecks() []machine.Check {
	c := machine.Check{Name: "io_uring", State: machine.OK, Backends: []string{posixName},
		Why: "files are read and written through a ring"}
	var missing *driver.UnavailableError
	_, err := posix.Examine(posix.Config{Path: posix.PathRing})
	switch {
	case errors.As(err, &missing):
		c.State, c.Found, c.Fix = machine.Limited, missing.Reason, missing.Fix
		c.Why = "files go through a pool of threads with preadv and pwritev"
	case err != nil:
		return nil // to open the backend says it, too
	default:
		c.Found = "allowed, and has what posix uses"
	}
	return []machine.Check{c}
}
