// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// childVariable makes a test binary the second process of the harness that it
// names.
const childVariable = "SLUICE_DRIVERTEST_CHILD"

// serveChild obeys orders from standard input, one JSON line each, until it ends.
// It returns the exit status.
func serveChild(name string, harnesses []Harness) int {
	for _, h := range harnesses {
		if h.withDefaults().Name != name {
			continue
		}
		if err := obey(h, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "second process:", err)
			return 1
		}
		return 0
	}
	fmt.Fprintf(os.Stderr, "second process: Main was not given a harness named %q\n", name)
	return 2
}

func obey(h Harness, in io.Reader, out io.Writer) error {
	var (
		side   *host
		leaks  *recorder
		orders = json.NewDecoder(in)
		answer = json.NewEncoder(out)
	)
	for {
		var q request
		if err := orders.Decode(&q); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("read order: %w", err)
		}
		var r reply
		switch {
		case q.Do == "open":
			var err error
			if q.Populate {
				h = h.forBenchmarks()
			}
			h = h.withDefaults()
			leaks = &recorder{}
			h.check(leaks)
			side, err = openHost(h)
			r.Err = relay(err)
		case side == nil:
			r.Err = relay(fmt.Errorf("order %q before open", q.Do))
		case q.Do == "close":
			r.Faults = side.close()
			side = nil
			if n := errands.wait(errandsMax); n > 0 {
				r.Faults = append(r.Faults, fmt.Sprintf("%d goroutines have not ended\n%s", n,
					stacks()))
			}
			r.Faults = append(r.Faults, leaks.tidy()...)
		default:
			r = side.do(q)
		}
		if err := answer.Encode(r); err != nil {
			return fmt.Errorf("write answer: %w", err)
		}
	}
}
