// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

func TestSetDefault(t *testing.T) {
	n, d, name := 0, 3*time.Second, ""
	SetDefault(&n, 7)
	SetDefault(&d, time.Minute)
	SetDefault(&name, "x")
	if n != 7 || d != 3*time.Second || name != "x" {
		t.Errorf("%d, %v, %q: want what was zero set, and the rest as it was", n, d, name)
	}
}

func TestCheckWithin(t *testing.T) {
	for _, v := range []int{1, 5, 9} {
		if err := CheckWithin("Threads", v, 1, 9); err != nil {
			t.Error(err)
		}
	}
	for _, v := range []int{-1, 0, 10} {
		err := CheckWithin("Threads", v, 1, 9)
		if want := fmt.Sprintf("Threads %d is not within 1 to 9", v); !errors.Is(err,
			driver.ErrBounds) || !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v", v, err)
		}
	}
}
