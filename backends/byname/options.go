// SPDX-License-Identifier: Apache-2.0

package byname

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/sluicehq/sluice/internal/figures"
)

// Error says which words of a caller are wrong, and what there is in their place.
type Error struct{ text string }

// Error implements error.
func (e *Error) Error() string { return e.text }

// Errorf returns an *Error.
func Errorf(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// Split reads NAME or NAME:OPTION=VALUE,OPTION=VALUE. A piece without "=" behind a comma belongs to
// the value before it, as in devices=rxe0,rxe2. A comma behind a backslash is part of a value, as
// of a path that has "=" behind a comma. An option without a value is an *Error: it would say
// nothing, as where a variable of a script is not set.
func Split(spec string) (name string, words []string, err error) {
	name, rest, found := strings.Cut(spec, ":")
	if name == "" || found && rest == "" {
		return "", nil, Errorf("%q: want a name, or NAME:OPTION=VALUE,OPTION=VALUE", spec)
	}
	if !found {
		return name, nil, nil
	}
	const comma = "\x00" // which no argument of a command and no path has
	for _, piece := range strings.Split(strings.ReplaceAll(rest, `\,`, comma), ",") {
		if strings.Contains(piece, "=") || len(words) == 0 {
			words = append(words, piece)
		} else {
			words[len(words)-1] += "," + piece
		}
	}
	for i, w := range words {
		if option, found := strings.CutSuffix(w, "="); found {
			return "", nil, Errorf("option %s is empty: give it a value, or leave it out", option)
		}
		words[i] = strings.ReplaceAll(w, comma, ",")
	}
	return name, words, nil
}

// SetOptions sets exported fields of the struct that config points to: "ring_bytes=65536" sets
// RingBytes. Durations are "50ms" and the like, sizes may be "8MiB". A field that is a list takes
// one element a word, one of numbers several with commas between. What is wrong with a word is an
// *Error.
func SetOptions(config any, words []string) error {
	c := reflect.ValueOf(config).Elem()
	for _, w := range words {
		name, value, found := strings.Cut(w, "=")
		if !found {
			return Errorf("option %q: write it as name=value", w)
		}
		field, names := fieldOf(c, name)
		if !field.IsValid() {
			return Errorf("option %q does not exist: there are %s", name, strings.Join(names, ", "))
		}
		if err := setters[field.Type()](field, value); err != nil {
			return Errorf("option %s: %v", w, err)
		}
	}
	return nil
}

// fieldOf returns the field of that name, and the names of all that can be set.
func fieldOf(config reflect.Value, name string) (field reflect.Value, names []string) {
	for _, f := range reflect.VisibleFields(config.Type()) {
		if f.Anonymous || !f.IsExported() || setters[f.Type] == nil {
			continue
		}
		names = append(names, OptionName(f.Name))
		if OptionName(f.Name) == name {
			field = config.FieldByIndex(f.Index)
		}
	}
	return field, names
}

// OptionName writes the name of a field as that of an option: RingBytes as ring_bytes, MTU as mtu.
func OptionName(field string) string {
	var b strings.Builder
	lower := false
	for _, r := range field {
		if unicode.IsUpper(r) && lower {
			b.WriteByte('_')
		}
		lower = unicode.IsLower(r)
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// setters parse a value into a field, by the field's type.
var setters = map[reflect.Type]func(field reflect.Value, value string) error{
	reflect.TypeFor[string](): func(f reflect.Value, v string) error {
		f.SetString(v)
		return nil
	},
	reflect.TypeFor[[]string](): func(f reflect.Value, v string) error {
		f.Set(reflect.Append(f, reflect.ValueOf(v)))
		return nil
	},
	reflect.TypeFor[time.Duration](): parsed("a time such as 50ms or 5s", time.ParseDuration),
	reflect.TypeFor[bool]():          parsed("true or false", strconv.ParseBool),
	reflect.TypeFor[int](): parsed("a whole number, or a size such as 64KiB", func(v string) (int,
		error) {
		n, err := sizeOrCount(v)
		if err != nil || n > math.MaxInt {
			return strconv.Atoi(v) // which may be negative
		}
		return int(n), nil
	}),
	reflect.TypeFor[uint64](): parsed("a number from 0, or a size such as 64KiB", func(v string) (
		uint64, error) {
		return sizeOrCount(v)
	}),
	reflect.TypeFor[[]int](): func(f reflect.Value, v string) error {
		for _, one := range strings.Split(v, ",") {
			n, err := strconv.Atoi(one)
			if err != nil {
				return fmt.Errorf("want whole numbers with commas between")
			}
			f.Set(reflect.Append(f, reflect.ValueOf(n)))
		}
		return nil
	},
}

// sizeOrCount reads a whole number, or a size with its unit: half a connection is none.
func sizeOrCount(v string) (uint64, error) {
	if strings.TrimRight(v, "0123456789") == v { // a unit stands at the end
		return figures.ParseSize(v)
	}
	return strconv.ParseUint(v, 10, 64)
}

// parsed sets a field to what parse makes of a value; want is what it takes.
func parsed[T any](want string, parse func(string) (T, error)) func(reflect.Value, string) error {
	return func(field reflect.Value, value string) error {
		v, err := parse(value)
		if err != nil {
			return fmt.Errorf("want %s", want)
		}
		field.Set(reflect.ValueOf(v))
		return nil
	}
}
