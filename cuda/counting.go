// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// countingBytes is the page of a tally.
const countingBytes = 4096

// counting is a tally in pinned memory of the host. Kernels add to it by way of the bus what they
// leave out, which is mostly nothing: so no launch waits for a copy of it.
type counting struct {
	page    *hostmem.Buffer // nil: the device is closed
	at      uint64          // of the page, as the card sees it
	unknown bool            // a launch failed, which may be under way yet
}

func (c *counting) open(d *gpu.Device) (err error) {
	if c.page, err = hostmem.Alloc(countingBytes, hostmem.Options{Purpose: "cuda-tally",
		Populate: true}); err != nil {
		return err
	}
	c.at, err = d.Pin(c.page.Bytes())
	return err
}

// count has a launch count afresh: launch waits for its end. What may be under way of a launch that
// failed is awaited before.
func (c *counting) count(d *gpu.Device, launch func() error) (t tally, err error) {
	if c.page == nil {
		return t, driver.ErrClosed
	}
	if c.unknown {
		if err := d.Sync(); err != nil {
			return t, err
		}
	}
	copy(c.page.Bytes(), clean.bytes())
	c.unknown = true
	if err := launch(); err != nil {
		return t, err
	}
	c.unknown = false
	copy(t.bytes(), c.page.Bytes())
	return t, nil
}

// close undoes open, or what there is of it; of a closed device it is done already.
func (c *counting) close(d *gpu.Device) (err error) {
	if c.at != 0 {
		err = d.Unpin(c.page.Bytes())
		c.at = 0
	}
	if c.page != nil {
		_ = c.page.Close()
		c.page = nil
	}
	if errors.Is(err, driver.ErrClosed) {
		return nil
	}
	return err
}
