// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// countingBytes is the pinned page to which a tally comes back.
const countingBytes = 4096

// counting is a tally in a card's memory. Kernels add to it what they leave out, which is mostly
// nothing: it is written before a launch only if the one before left something.
type counting struct {
	at   uint64 // on the card
	page *hostmem.Buffer
	out  []byte // where a launch leaves it
	used bool   // it was written once
	last tally  // what is there; unknown unless used
}

func (c *counting) open(d *gpu.Device) (err error) {
	if c.at, err = d.Alloc(tallyBytes); err != nil {
		return err
	}
	if c.page, err = hostmem.Alloc(countingBytes, hostmem.Options{Purpose: "cuda-tally",
		Populate: true}); err != nil {
		return err
	}
	if _, err = d.Pin(c.page.Bytes()); err != nil {
		return err
	}
	c.out = c.page.Bytes()[:tallyBytes]
	return nil
}

// fresh is what the next launch must write to the card's tally before; nil: it is there. took
// follows unless the launch fails.
func (c *counting) fresh() []byte {
	known := c.used && c.last == clean
	c.used, c.last = false, clean // what a failure leaves is unknown
	if known {
		return nil
	}
	return c.last.bytes()
}

// took is what a launch has counted.
func (c *counting) took() tally {
	copy(c.last.bytes(), c.out)
	c.used = true
	return c.last
}

// close undoes open, or what there is of it; of a closed device it is done already.
func (c *counting) close(d *gpu.Device) (err error) {
	if c.out != nil {
		err = d.Unpin(c.page.Bytes())
		c.out = nil
	}
	if c.page != nil {
		_ = c.page.Close()
		c.page = nil
	}
	if c.at != 0 {
		err = errors.Join(err, d.Free(c.at))
		c.at = 0
	}
	if errors.Is(err, driver.ErrClosed) {
		return nil
	}
	return err
}
