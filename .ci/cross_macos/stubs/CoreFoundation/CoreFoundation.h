// What metal-cpp takes from Apple's CoreFoundation.
#pragma once
typedef double CFTimeInterval;
typedef const struct __CFString* CFStringRef;
